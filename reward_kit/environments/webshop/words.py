"""What the catalogue is made of: kinds of products with their names, attributes, options and prices, and brands."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of product.

    Attributes:
        name: what people search for; all of its words are nouns, or count as such.
        category: a path of three levels.
        keywords: further nouns that sellers put into the title.
        attributes: what a product may be said to have.
        options: what a buyer chooses, and among which values.
        prices: the lowest and the highest price, in dollars.
    """

    name: str
    category: tuple[str, str, str]
    keywords: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    prices: tuple[int, int]


def _kind(name: str, category: str, keywords: str, attributes: str, options: str, prices: tuple[int, int]) -> Kind:
    """A kind from its short form: " > " between levels, ", " between words, "; " between options."""
    first, second, third = category.split(" > ")
    chosen = (entry.split(": ") for entry in options.split("; "))
    named = {option: tuple(values.split(", ")) for option, values in chosen}
    return Kind(name, (first, second, third), tuple(keywords.split()), tuple(attributes.split(", ")), named, prices)


_HUES = "black, white, navy, red, green, grey, beige, purple"
_WEAR = "size: xs, s, m, l, xl, xxl"
_SHOE = "size: 6, 7, 8, 9, 10, 11, 12"
_CLOTHES = "machine washable, quick drying, long sleeve, stretch fabric, regular fit, organic cotton, moisture wicking"
_GADGET = "fast charging, water resistant, low latency, noise reducing, long battery life, touch control, easy pairing"
_FOOD = "gluten free, non gmo, low sugar, fair trade, vegan, resealable bag, no artificial flavors, kosher certified"
_BEAUTY = (
    "fragrance free, cruelty free, dermatologist tested, paraben free, for sensitive skin, long lasting, alcohol free"
)
_ROOM = "easy assembly, solid wood, space saving, scratch resistant, adjustable height, metal frame, non slip feet"
_COOK = "dishwasher safe, bpa free, heat resistant, nonstick, stainless steel, leak proof, easy to clean"
_SPORT = "sweat proof, lightweight, shock absorbing, adjustable strap, non slip grip, foldable, carry bag included"

KINDS: tuple[Kind, ...] = (
    _kind(
        "rain jacket",
        "Clothing > Outerwear > Rainwear",
        "windbreaker shell parka anorak raincoat",
        f"waterproof, wind resistant, hidden hood, reflective trim, {_CLOTHES}",
        f"color: {_HUES}; {_WEAR}",
        (25, 140),
    ),
    _kind(
        "down vest",
        "Clothing > Outerwear > Vests",
        "gilet bodywarmer puffer layer insulation",
        f"wind resistant, zip pockets, stand collar, {_CLOTHES}",
        f"color: {_HUES}; {_WEAR}",
        (20, 110),
    ),
    _kind(
        "polo shirt",
        "Clothing > Tops > Polos",
        "golf uniform tee collar placket",
        f"short sleeve, wrinkle free, button closure, {_CLOTHES}",
        f"color: {_HUES}; {_WEAR}",
        (10, 60),
    ),
    _kind(
        "yoga pants",
        "Clothing > Activewear > Leggings",
        "tights workout gym waistband capri",
        f"high waist, tummy control, side pockets, squat proof, {_CLOTHES}",
        f"color: {_HUES}; {_WEAR}",
        (12, 70),
    ),
    _kind(
        "hiking boots",
        "Shoes > Outdoor > Boots",
        "trekking trail footwear ankle mountain",
        "waterproof, slip resistant, wide width, memory foam, steel toe, rubber sole, arch support",
        f"color: brown, black, olive, grey; {_SHOE}",
        (35, 190),
    ),
    _kind(
        "running shoes",
        "Shoes > Athletic > Running",
        "sneakers trainers jogging marathon footwear",
        "breathable mesh, arch support, memory foam, rubber sole, reflective trim, wide width, slip resistant",
        f"color: {_HUES}; {_SHOE}",
        (30, 160),
    ),
    _kind(
        "wool blanket",
        "Home > Bedding > Blankets",
        "throw bedspread cover couch camping",
        "machine washable, hypoallergenic, reversible, double stitched, extra thick, moth proof",
        "color: cream, charcoal, rust, teal; size: twin, queen, king",
        (25, 150),
    ),
    _kind(
        "shower curtain",
        "Home > Bath > Curtains",
        "liner bathroom drape hooks tub",
        "mildew resistant, machine washable, quick drying, weighted hem, rust proof grommets, extra long",
        "color: white, teal, charcoal, sage; size: 60x72, 72x72, 72x84",
        (9, 55),
    ),
    _kind(
        "desk lamp",
        "Home > Lighting > Lamps",
        "office reading nightstand study bulb",
        "dimmable, usb port, eye caring, touch control, adjustable arm, memory function, energy saving",
        "color: black, white, silver, gold",
        (15, 90),
    ),
    _kind(
        "bar stool",
        "Home > Furniture > Stools",
        "counter kitchen seat chair pub",
        f"swivel seat, faux leather, padded back, {_ROOM}",
        "color: walnut, espresso, white, grey; pack: 1 pack, 2 pack, 4 pack",
        (40, 260),
    ),
    _kind(
        "bookshelf",
        "Home > Furniture > Shelves",
        "bookcase rack storage organizer shelving",
        f"open back, wall mounted, {_ROOM}",
        "color: walnut, oak, white, black; tiers: 3 tier, 4 tier, 5 tier",
        (30, 220),
    ),
    _kind(
        "water bottle",
        "Kitchen > Drinkware > Bottles",
        "flask tumbler canteen hydration thermos",
        f"double wall, wide mouth, sweat proof, carry handle, {_COOK}",
        f"color: {_HUES}; size: 18 oz, 24 oz, 32 oz, 40 oz",
        (10, 50),
    ),
    _kind(
        "frying pan",
        "Kitchen > Cookware > Pans",
        "skillet omelette griddle stove induction",
        f"oven safe, even heating, ceramic coating, {_COOK}",
        "size: 8 inch, 10 inch, 12 inch",
        (15, 110),
    ),
    _kind(
        "lunch box",
        "Kitchen > Storage > Lunch",
        "bento container meal kids tote",
        f"insulated, microwave safe, removable dividers, {_COOK}",
        "color: blue, pink, green, grey; size: small, large",
        (9, 45),
    ),
    _kind(
        "wireless earbuds",
        "Electronics > Audio > Headphones",
        "bluetooth earphones headset buds charger",
        f"sweat proof, deep bass, {_GADGET}",
        "color: black, white, mint, rose",
        (15, 180),
    ),
    _kind(
        "portable speaker",
        "Electronics > Audio > Speakers",
        "bluetooth stereo boombox party soundbox",
        f"deep bass, dust proof, built in microphone, {_GADGET}",
        "color: black, blue, red, camo",
        (18, 200),
    ),
    _kind(
        "phone case",
        "Electronics > Phones > Cases",
        "bumper cover shell protector smartphone",
        "shock proof, wireless charging compatible, slim fit, anti yellowing, raised edges, built in kickstand",
        "color: clear, black, lavender, navy; model: alpha 12, bravo 13, delta 14",
        (7, 40),
    ),
    _kind(
        "hdmi cable",
        "Electronics > Video > Cables",
        "cord wire monitor television adapter",
        "gold plated, high speed, braided nylon, plug and play, tangle free, flame retardant",
        "length: 3 ft, 6 ft, 10 ft, 15 ft; pack: 1 pack, 2 pack",
        (6, 35),
    ),
    _kind(
        "protein bars",
        "Grocery > Snacks > Bars",
        "snack nutrition breakfast energy granola",
        f"high protein, keto friendly, {_FOOD}",
        "flavor: peanut butter, dark chocolate, coconut, lemon; pack: 6 pack, 12 pack, 30 pack",
        (10, 60),
    ),
    _kind(
        "green tea",
        "Grocery > Beverages > Tea",
        "sachets matcha sencha leaves drink",
        f"caffeine free, loose leaf, {_FOOD}",
        "flavor: jasmine, mint, original, peach; size: 20 count, 100 count",
        (6, 40),
    ),
    _kind(
        "trail mix",
        "Grocery > Snacks > Nuts",
        "almonds cashews raisins snack fruit",
        f"lightly salted, high fiber, {_FOOD}",
        "flavor: tropical, classic, spicy; size: 8 oz, 16 oz, 32 oz",
        (7, 45),
    ),
    _kind(
        "face cream",
        "Beauty > Skin > Moisturizers",
        "lotion moisturizer hydration gel skincare",
        f"with vitamin c, with hyaluronic acid, non greasy, {_BEAUTY}",
        "size: 1 oz, 2 oz, 4 oz",
        (8, 75),
    ),
    _kind(
        "hair mask",
        "Beauty > Hair > Treatments",
        "conditioner repair keratin scalp treatment",
        f"sulfate free, with argan oil, for dry hair, for curly hair, {_BEAUTY}",
        "scent: coconut, vanilla, unscented; size: 8 oz, 16 oz",
        (8, 45),
    ),
    _kind(
        "lip balm",
        "Beauty > Lips > Balms",
        "chapstick butter gloss moisturizer stick",
        f"with spf, with shea butter, tinted, {_BEAUTY}",
        "flavor: cherry, honey, mint; pack: 1 pack, 3 pack",
        (4, 25),
    ),
    _kind(
        "yoga mat",
        "Sports > Fitness > Mats",
        "pilates exercise floor workout stretching",
        f"extra thick, eco friendly, odor free, {_SPORT}",
        f"color: {_HUES}; thickness: 4 mm, 6 mm, 10 mm",
        (15, 85),
    ),
    _kind(
        "camping tent",
        "Sports > Camping > Tents",
        "shelter dome backpacking canopy cabin",
        f"waterproof, easy setup, mesh windows, wind resistant, {_SPORT}",
        "color: orange, green, blue; capacity: two person, four person, six person",
        (45, 290),
    ),
    _kind(
        "bike helmet",
        "Sports > Cycling > Helmets",
        "bicycle cycling road commuter visor",
        f"certified safety, detachable liner, rear light, {_SPORT}",
        "color: white, black, lime, red; size: s, m, l",
        (20, 120),
    ),
    _kind(
        "dog leash",
        "Pets > Dogs > Leashes",
        "puppy lead rope walking collar",
        "reflective threads, padded handle, heavy duty, chew proof, tangle free, dual clip",
        "color: red, blue, black, pink; length: 4 ft, 6 ft, 10 ft",
        (7, 40),
    ),
    _kind(
        "cat tree",
        "Pets > Cats > Furniture",
        "tower condo scratcher kitten perch",
        "sisal posts, washable cushion, sturdy base, hanging toys, easy assembly, space saving",
        "color: beige, grey, brown; tiers: 2 tier, 3 tier, 5 tier",
        (30, 180),
    ),
    _kind(
        "throw pillow",
        "Home > Bedding > Pillows",
        "cushion sofa couch accent decor",
        "hidden zipper, machine washable, hypoallergenic, double stitched, plush filling, fade resistant",
        f"color: {_HUES}; size: 16x16, 18x18, 20x20",
        (8, 50),
    ),
)

_BRANDS = (
    "Northpine Kestrel Lumora Bramwell Ostara Fenwick Zephyra Halden Corvo Tamsin Alderly Brightwater Quillon Marlowe "
    "Sorrel Vantry Ellsworth Pavonia Drift Hollis Juniper Cascadia Rookwood Solveig Thistle Umbra Wexford Yarrow "
    "Ardent Belmere"
)
BRANDS: tuple[str, ...] = tuple(_BRANDS.split())
"""Invented names."""

PRAISE: tuple[str, ...] = (
    "made to last for years of daily use",
    "a favorite of people who have tried many others",
    "tested in our own workshop before it ships",
    "comes with a friendly support team",
    "a thoughtful gift for birthdays and holidays",
    "packed without plastic",
    "thirty days to send it back",
    "designed by a small team that uses it",
)
