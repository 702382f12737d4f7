import sys

sys.path.append("/app")
try:
    from slug import slug
except BaseException:
    sys.exit(1)

assert slug("Hello, World!") == "hello-world"
assert slug("  a  b ") == "a-b"
assert slug("C3 PO") == "c3-po"
assert slug("---") == ""

print("finished 71f3")
