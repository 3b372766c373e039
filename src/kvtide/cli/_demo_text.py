"""The document of the demonstration: the log of a survey ship, a hundred days long, and questions about it.

It is generated from a few words and a seed, so that it is the same on every machine and as long as necessary.
"""

from __future__ import annotations

import random

__all__ = ["QUESTIONS", "document"]

QUESTIONS = (
    "Which harbour did the Halcyon leave?",
    "What did the cook lose overboard on the first day?",
    "Which island did the Halcyon set out to survey?",
)

_BEGINNING = """This is the log of the survey ship Halcyon. Captain Ingrid Solberg commands her. She left the harbour \
of Port Meridian on the first of March to survey the coast of Lantern Island. On the first day the cook lost a copper \
kettle overboard.
"""

_WINDS = ("a light breeze", "a fresh breeze", "a steady wind", "half a gale", "hardly any wind", "a cold wind")
_QUARTERS = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
_SKIES = ("clear sky", "low cloud", "rain until noon", "fog in the morning", "high thin cloud", "a sky full of birds")
_WORK = (
    "The boats took soundings along the reef",
    "The carpenter mended the rail of the foredeck",
    "We landed two parties to measure the bay",
    "The mate drew the outline of the cape",
    "All hands scraped and painted the port side",
    "The instruments were compared with the stars",
    "The anchor was fouled and it took the whole watch to free it",
    "We gathered fresh water at the mouth of a stream",
)
_SIGHTS = (
    "a pod of grey whales",
    "smoke on the shore",
    "a drifting spar",
    "two fishing boats",
    "a green light far out",
    "seals on the rocks",
    "nothing but water",
    "a flight of terns",
)


def document(days: int) -> str:
    """The log of that many days."""
    numbers = random.Random("Halcyon")
    entries = [_BEGINNING]
    for day in range(2, days + 2):
        entries.append(
            f"Day {day}. We had {numbers.choice(_WINDS)} from the {numbers.choice(_QUARTERS)} and "
            f"{numbers.choice(_SKIES)}. {numbers.choice(_WORK)}. The depth was {numbers.randint(4, 90)} fathoms, the "
            f"glass stood at {numbers.randint(980, 1035)}. At dusk the lookout saw {numbers.choice(_SIGHTS)}.\n"
        )
    return "".join(entries)
