assert open("/app/count.txt").read().strip() == "5"
