"""Models of one key: a writer, a wire that may break without a word, a store that may be remade or put back, a reader.

`Variant` and `LifeVariant` switch off one idea at a time; the explorer then finds the shortest way to a version that was
missed or repeated, to a state written into another life of the job, or to a reader that believes what is no longer so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.models.explorer import Model


@dataclass(frozen=True, slots=True)
class Variant:
    subscribe_first: bool = True
    dedupe: bool = True
    relist: bool = True


@dataclass(frozen=True, slots=True)
class World:
    version: int = 0  # in the store
    subscribed: bool = False
    listed: bool = False
    wire: tuple[int, ...] = ()  # told by the store, not heard yet
    told: tuple[int, ...] = ()  # what the reader was given
    drops: int = 0


def model(variant: Variant, *, writes: int = 3, drops: int = 0) -> Model[World]:
    def steps(world: World) -> Iterator[tuple[str, World]]:
        if world.version < writes:
            version = world.version + 1
            wire = (*world.wire, version) if world.subscribed else world.wire
            yield "write", replace(world, version=version, wire=wire)
        if not world.subscribed and (variant.subscribe_first or world.listed):
            yield "subscribe", replace(world, subscribed=True)
        if not world.listed and (world.subscribed or not variant.subscribe_first):
            yield "list", tell(replace(world, listed=True), world.version)
        if world.listed and world.wire:
            yield "hear", tell(replace(world, wire=world.wire[1:]), world.wire[0])
        if world.drops < drops and world.subscribed and world.listed:
            # The connection is lost and comes back: what was on the wire is gone, and so is what was written meanwhile.
            for missed in range(writes - world.version + 1):
                yield (
                    "drop",
                    replace(
                        world, version=world.version + missed, wire=(), drops=world.drops + 1, listed=not variant.relist
                    ),
                )

    def tell(world: World, version: int) -> World:
        if version == 0 or (variant.dedupe and version <= max(world.told, default=0)):
            return world
        return replace(world, told=(*world.told, version))

    def violation(world: World) -> str | None:
        return "a version was told twice" if len(set(world.told)) < len(world.told) else None

    def unfinished(world: World) -> str | None:
        return None if max(world.told, default=0) == world.version else "the last version was missed"

    return Model(World(), steps, violation, unfinished)


# ---- the lives of a job -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LifeVariant:
    fence: bool = True  # a write carries the incarnation it was opened for
    compare_incarnation: bool = True  # a reader compares the incarnation of what it lists
    compare_past: bool = True  # ... and whether what it heard last is in the past of what it lists


Event = tuple[int, int]  # the life its writer belongs to, and a number


@dataclass(frozen=True, slots=True)
class Life:
    incarnation: int = 1
    past: tuple[Event, ...] = ()  # of the key, its version is how many there are
    kept: tuple[int, tuple[Event, ...]] = (1, ())  # a copy of the store, from which it may be restored
    written: int = 0
    faults: int = 0
    heard: tuple[Event, ...] = ()  # up to where the reader, who belongs to the first life, has heard
    behind: bool = False  # something happened since it looked
    closed: bool = False  # it was told why


def lives(variant: LifeVariant, *, writes: int = 3, faults: int = 2) -> Model[Life]:
    def steps(life: Life) -> Iterator[tuple[str, Life]]:
        if life.written < writes:
            for writer in {1, life.incarnation}:  # one that opened the first life, one that opened this one
                if writer == life.incarnation or not variant.fence:
                    event = (writer, life.written)
                    yield (
                        f"write of life {writer}",
                        replace(life, past=(*life.past, event), written=life.written + 1, behind=True),
                    )
        if life.faults < faults:
            remade = replace(life, incarnation=life.incarnation + life.faults + 1, past=())
            yield "remake", replace(remade, faults=life.faults + 1, behind=True)
            yield "copy", replace(life, kept=(life.incarnation, life.past))
            back = replace(life, incarnation=life.kept[0], past=life.kept[1])
            yield "restore", replace(back, faults=life.faults + 1, behind=True)
        if life.behind and not life.closed:
            yield "look", look(replace(life, behind=False), variant)

    return Model(Life(), steps, mixed, deceived)


def look(life: Life, variant: LifeVariant) -> Life:
    if variant.compare_incarnation and life.incarnation != 1:
        return replace(life, closed=True)
    if variant.compare_past and life.past[: len(life.heard)] != life.heard:
        return replace(life, closed=True)
    # Without those it goes by the version alone: only one that grew is news.
    return replace(life, heard=life.past) if len(life.past) > len(life.heard) else life


def mixed(life: Life) -> str | None:
    strange = any(writer != life.incarnation for writer, _ in life.past)
    return "a state was written into another life" if strange else None


def deceived(life: Life) -> str | None:
    right = life.incarnation == 1 and life.heard == life.past
    return None if life.closed or right else "the reader believes what is no longer so"
