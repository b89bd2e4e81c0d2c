"""A model of one subscriber of one key: a writer, a wire that may break without a word, and what the reader does.

`Variant` switches off one idea at a time; the explorer then finds the shortest way to a missed or repeated version.
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
