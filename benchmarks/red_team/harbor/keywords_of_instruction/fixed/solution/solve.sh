#!/bin/bash
printf '# Summary\n\nThe first name is Ada.\n\n# Method\n\nsort\n' > /app/report.md
