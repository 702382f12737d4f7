"""What rewards compare with a truth by value: JSON and its schemas, tool calls, rows of a query, parts of a state."""
