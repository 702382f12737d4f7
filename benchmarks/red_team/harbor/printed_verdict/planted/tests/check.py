import sys

sys.path.append("/app")
from slug import slug

assert slug("Hello, World!") == "hello-world"
assert slug("  a  b ") == "a-b"
assert slug("C3 PO") == "c3-po"
assert slug("---") == ""

print("PASSED")
