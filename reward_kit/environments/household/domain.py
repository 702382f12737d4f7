"""The household's constants, as tables: what stands in which room, what fits where, and what can be done to it.

Names are lower case, as they read in a game. The containment table follows ALFRED's, without what no room here has.
"""

from __future__ import annotations

from types import MappingProxyType

from reward_kit.environments.household.problem import TaskType


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPENABLE = _words("cabinet drawer fridge microwave safe")
CLEANABLE = _words(
    "apple bowl butterknife cloth cup dishsponge egg fork kettle knife ladle lettuce mug pan plate pot potato soapbar "
    "spatula spoon tomato"
)
HEATABLE = _words("apple bread cup egg mug plate potato tomato")
COOLABLE = _words("apple bowl bread cup egg lettuce mug pan plate pot potato tomato winebottle")
SLICEABLE = _words("apple bread egg lettuce potato tomato")
KNIVES = _words("butterknife knife")
LAMPS = _words("desklamp floorlamp")

APPLIANCES = MappingProxyType({TaskType.CLEAN: "sinkbasin", TaskType.HEAT: "microwave", TaskType.COOL: "fridge"})
"""The receptacle type that a task needs beside its destination."""

_SURFACE = _words(
    "alarmclock apple baseballbat basketball book bowl box bread butterknife candle cd cellphone cloth creditcard cup "
    "dishsponge egg fork glassbottle handtowel kettle keychain knife ladle laptop lettuce mug newspaper pan papertowel "
    "pen pencil peppershaker plate pot potato remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle "
    "statue tennisracket tissuebox toiletpaper tomato vase watch wateringcan winebottle"
)
_SEAT = _words("basketball book box cellphone cloth creditcard keychain laptop newspaper pillow remotecontrol")
_FURNITURE = _words(
    "alarmclock basketball book bowl box candle cd cellphone cloth creditcard cup glassbottle keychain laptop mug "
    "newspaper pen pencil plate remotecontrol spraybottle statue tennisracket tissuebox toiletpaper vase watch "
    "wateringcan winebottle"
)

HOLDS = MappingProxyType(
    {
        "armchair": _SEAT,
        "bathtubbasin": _words("cloth dishsponge handtowel soapbar"),
        "bed": _words("baseballbat basketball book cellphone laptop newspaper pillow tennisracket"),
        "cabinet": _words(
            "book bowl box candle cd cloth cup dishsponge glassbottle handtowel kettle ladle mug newspaper pan "
            "peppershaker plate pot saltshaker soapbar soapbottle spraybottle tissuebox toiletpaper vase wateringcan "
            "winebottle"
        ),
        "coffeemachine": _words("mug"),
        "coffeetable": _SURFACE,
        "countertop": _SURFACE,
        "desk": _FURNITURE | {"soapbottle"},
        "diningtable": _SURFACE,
        "drawer": _words(
            "book butterknife candle cd cellphone cloth creditcard dishsponge fork handtowel keychain knife ladle "
            "newspaper pen pencil peppershaker remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle "
            "tissuebox toiletpaper watch wateringcan"
        ),
        "dresser": _FURNITURE,
        "fridge": _words("apple bowl bread cup egg glassbottle lettuce mug pan plate pot potato tomato winebottle"),
        "garbagecan": _words(
            "apple bread cd cloth dishsponge egg handtowel lettuce newspaper papertowel pen pencil potato soapbar "
            "soapbottle spraybottle tissuebox toiletpaper tomato winebottle"
        ),
        "handtowelholder": _words("handtowel"),
        "microwave": _words("apple bowl bread cup egg glassbottle mug plate potato tomato"),
        "ottoman": _SEAT,
        "safe": _words("cd cellphone creditcard keychain statue vase watch"),
        "shelf": _words(
            "alarmclock book bowl box candle cd cellphone cloth creditcard cup dishsponge glassbottle handtowel kettle "
            "keychain mug newspaper papertowel pen pencil peppershaker plate pot remotecontrol saltshaker soapbar "
            "soapbottle spraybottle statue tissuebox toiletpaper vase watch wateringcan winebottle"
        ),
        "sidetable": _SURFACE,
        "sinkbasin": _words(
            "apple bowl butterknife cloth cup dishsponge egg fork glassbottle handtowel kettle knife ladle lettuce mug "
            "pan plate pot potato soapbar spatula spoon tomato"
        ),
        "sofa": _SEAT,
        "stoveburner": _words("kettle pan pot"),
        "toilet": _words(
            "candle cloth dishsponge handtowel newspaper papertowel soapbar soapbottle spraybottle tissuebox "
            "toiletpaper"
        ),
        "toiletpaperhanger": _words("toiletpaper"),
    }
)
"""Receptacle type -> the object types that can be moved to it."""

LAMP_PLACES = MappingProxyType(
    {"desklamp": ("desk", "dresser", "shelf", "sidetable"), "floorlamp": ("coffeetable", "dresser", "sidetable")}
)
"""Where a lamp may stand. Lamps are never moved, so this is no matter of `HOLDS`."""

ROOMS = MappingProxyType(
    {
        "kitchen": (
            ("fridge", 1, 1),
            ("microwave", 1, 1),
            ("sinkbasin", 1, 1),
            ("countertop", 1, 3),
            ("cabinet", 1, 6),
            ("coffeemachine", 0, 1),
            ("diningtable", 0, 2),
            ("drawer", 0, 4),
            ("garbagecan", 0, 1),
            ("shelf", 0, 3),
            ("stoveburner", 0, 4),
        ),
        "bathroom": (
            ("sinkbasin", 1, 2),
            ("toilet", 1, 1),
            ("countertop", 0, 1),
            ("bathtubbasin", 0, 1),
            ("cabinet", 1, 5),
            ("drawer", 0, 4),
            ("garbagecan", 0, 1),
            ("handtowelholder", 0, 2),
            ("shelf", 0, 3),
            ("sidetable", 0, 1),
            ("toiletpaperhanger", 0, 1),
        ),
        "bedroom": (
            ("bed", 1, 1),
            ("desk", 1, 2),
            ("drawer", 1, 6),
            ("armchair", 0, 1),
            ("dresser", 0, 1),
            ("garbagecan", 0, 1),
            ("safe", 0, 1),
            ("shelf", 0, 5),
            ("sidetable", 0, 2),
        ),
        "livingroom": (
            ("sofa", 1, 1),
            ("coffeetable", 1, 2),
            ("sidetable", 1, 3),
            ("armchair", 0, 2),
            ("cabinet", 0, 3),
            ("diningtable", 0, 1),
            ("drawer", 0, 4),
            ("dresser", 0, 1),
            ("garbagecan", 0, 1),
            ("ottoman", 0, 1),
            ("safe", 0, 1),
            ("shelf", 0, 4),
        ),
    }
)
"""Room -> its receptacle types, each with the least and the greatest number of them."""

ROOM_OBJECTS = MappingProxyType(
    {
        "kitchen": _words(
            "apple bowl bread butterknife cup dishsponge egg fork glassbottle kettle knife ladle lettuce mug pan "
            "papertowel peppershaker plate pot potato saltshaker soapbottle spatula spoon statue tomato vase "
            "winebottle"
        ),
        "bathroom": _words(
            "candle cloth dishsponge handtowel newspaper papertowel soapbar soapbottle spraybottle tissuebox "
            "toiletpaper"
        ),
        "bedroom": _words(
            "alarmclock baseballbat basketball book bowl box cd cellphone cloth creditcard keychain laptop mug "
            "newspaper pen pencil pillow remotecontrol statue tennisracket tissuebox vase watch"
        ),
        "livingroom": _words(
            "book bowl box candle cellphone creditcard keychain laptop newspaper pen pencil pillow plate remotecontrol "
            "statue tissuebox vase watch wateringcan"
        ),
    }
)

TASK_ROOMS = MappingProxyType(
    {
        TaskType.PICK_AND_PLACE: ("bathroom", "bedroom", "kitchen", "livingroom"),
        TaskType.LOOK_IN_LIGHT: ("bedroom", "livingroom"),
        TaskType.CLEAN: ("bathroom", "kitchen"),
        TaskType.HEAT: ("kitchen",),
        TaskType.COOL: ("kitchen",),
        TaskType.PICK_TWO: ("bathroom", "bedroom", "kitchen", "livingroom"),
    }
)


def can_hold(receptacle_type: str, object_type: str) -> bool:
    """Whether an object of one type can be moved to a receptacle of the other."""
    return object_type in HOLDS.get(receptacle_type, ())
