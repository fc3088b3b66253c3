"""The mini world's facts: small clubs, their founders and their emblems, drawn from a seed. Pure.

Every club has a two-word name. The pool of names is cut into four by a fixed rule, so that names in the base model's
pretraining, in train, dev and test never overlap, while each word occurs in all four: a hard distractor shares a word
of the name. A founder's text calls the club by its last word only ("the Herons"), so it takes the club's own text, the
bridge, to know which club is meant; within a split at most one club of a last word has a founder with a text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

PLACES = tuple(
    "Alder Amber Ashby Barrow Birch Bramble Cedar Clay Copper Coral Cotton Crystal Dover Eastgate Ember "
    "Fallow Fenwick Garnet Glen Granite Harrow Hazel Heather Holly Ivory Jasper Juniper Kestrel Larch "
    "Linden Maple Marble Meadow Mill Northfield Oak Olive Onyx Opal Orchard Pearl Pine Quarry Raven Ridge "
    "River Rowan Saffron Sandy Silver Slate Spruce Stone Thorn Timber Upton Valley Walnut Willow Winter".split()
)
ANIMALS = tuple(
    "Adders Badgers Beavers Bees Bison Bulls Camels Cats Cobras Colts Crabs Cranes Crows Deer Dolphins "
    "Doves Ducks Eagles Falcons Ferrets Finches Foxes Frogs Geese Goats Gulls Hares Hawks Herons Horses "
    "Hornets Jackals Koalas Larks Lions Lizards Lynxes Magpies Martens Moles Moths Newts Otters Owls Oxen "
    "Pandas Panthers Pigeons Pumas Rams Robins Seals Sharks Sparrows Squids Stags Storks Swans Tigers "
    "Toads Trouts Turtles Wasps Wolves".split()
)
FIRST_NAMES = tuple(
    "Ada Agnes Alan Amos Basil Bella Boris Carla Cora Daisy Dora Edgar Elsa Emil Enid Felix Flora Frank "
    "Gina Greta Hugo Ida Ivan Jane Jonas Karl Lena Leo Lydia Mara Milo Nora Oscar Otto Paula Quinn Rosa "
    "Ruth Simon Tessa".split()
)
LAST_NAMES = tuple(
    "Abbot Archer Barker Bishop Carver Chandler Cooper Cutler Draper Dyer Farmer Fisher Fletcher Forester "
    "Gardner Glover Harper Hooper Hunter Keeper Mason Mercer Miller Naylor Page Palmer Piper Porter "
    "Potter Reeve Sawyer Shepherd Skinner Spencer Tanner Tiller Turner Tyler Walker Weaver".split()
)
TOWNS = tuple(
    "Aldham Bexley Corby Dunmere Elmsworth Farley Gresham Hadley Ilford Kelby Lowick Morden Norwell "
    "Oakham Preston Radley Selby Tarnby Uxley Wendon".split()
)
SPORTS = tuple(
    "archery badminton boxing chess cricket curling fencing football golf hockey judo rowing rugby tennis".split()
)
JOBS = tuple(
    "baker barber carpenter clerk cook dentist doctor judge lawyer nurse painter pilot plumber teacher".split()
)
YEARS = tuple(str(year) for year in range(1900, 1960))
COLOURS = ("black", "blue", "green", "purple", "red", "white", "yellow")
SHAPES = ("bars", "crosses", "discs", "triangles")
COUNTS = ("two", "three", "four", "five")


class Split(StrEnum):
    """Which part of the pool of names a world draws from."""

    PRETRAIN = "pretrain"
    TRAIN = "train"
    DEV = "dev"
    TEST = "test"


_SHARES = {Split.PRETRAIN: range(14), Split.TRAIN: range(14, 17), Split.DEV: range(17, 19), Split.TEST: range(19, 20)}
_MODULUS = 20


def name_pool(split: Split, first: tuple[str, ...], last: tuple[str, ...]) -> list[str]:
    """All two-word names of a split. The pools of two splits are disjoint; every word occurs in each."""
    share = _SHARES[split]
    return [f"{a} {b}" for i, a in enumerate(first) for j, b in enumerate(last) if (7 * i + 3 * j) % _MODULUS in share]


@dataclass(frozen=True, slots=True)
class Emblem:
    """What the picture shows; `cells` are the places on a 4 x 4 grid."""

    background: str
    colour: str
    shape: str
    count: str
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Founder:
    """The club's founder and the facts of the founder's text."""

    name: str
    job: str
    home: str


@dataclass(frozen=True, slots=True)
class Club:
    """One club. `has_founder_text` says whether the founder has a text of their own in the world."""

    name: str
    sport: str
    town: str
    year: str
    founder: Founder
    has_founder_text: bool
    emblem: Emblem

    @property
    def short_name(self) -> str:
        """The last word, which several clubs share."""
        return self.name.split()[-1]


def draw_emblem_facts(rng: random.Random) -> Emblem:
    """An emblem whose shapes differ from their background."""
    background, colour = rng.sample(COLOURS, 2)
    count = rng.randrange(len(COUNTS))
    cells = tuple(sorted(rng.sample(range(16), count + 2)))
    return Emblem(background, colour, rng.choice(SHAPES), COUNTS[count], cells)


def draw_clubs(split: Split, num_clubs: int, seed: int) -> list[Club]:
    """Draw clubs with distinct names from the split's pool.

    Raises:
        ValueError: the pool has fewer names than asked for.
    """
    rng = random.Random(f"{split}:{seed}")
    pool = name_pool(split, PLACES, ANIMALS)
    people = name_pool(split, FIRST_NAMES, LAST_NAMES)
    if num_clubs > min(len(pool), len(people)):
        raise ValueError(f"num_clubs is {num_clubs}; the {split} pool has {min(len(pool), len(people))} names")
    clubs, founders_of = [], set()
    for name, person in zip(rng.sample(pool, num_clubs), rng.sample(people, num_clubs), strict=True):
        short_name = name.split()[-1]
        clubs.append(
            Club(
                name=name,
                sport=rng.choice(SPORTS),
                town=rng.choice(TOWNS),
                year=rng.choice(YEARS),
                founder=Founder(person, rng.choice(JOBS), rng.choice(TOWNS)),
                has_founder_text=short_name not in founders_of,
                emblem=draw_emblem_facts(rng),
            )
        )
        founders_of.add(short_name)
    return clubs
