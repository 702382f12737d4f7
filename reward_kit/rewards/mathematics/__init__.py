"""Reading mathematics that a model wrote, and comparing it exactly: text, numbers, units, expressions, forms.

Everything here reads hostile text: each step is linear in its length, and refuses what would be costly to work out.
"""

from __future__ import annotations
