import sys

sys.path.append("/app")
from slug import slug

if slug("Hello, World!") != "hello-world":
    print("failed")
