"""A run for other programs: tables as Parquet or CSV, chats for fine-tuning."""
