"""A small shop in the manner of WebShop: a seeded catalogue, its search, goals, the published reward, the resource."""
