"""Drafts: a spec composed of a main model and its draft (MTP) modules.

The draft's layers follow the main model's. Packed ones whose region the main model has too ride in
that group's blocks, which just get longer: one table, one copy for all. Others have groups of their
own, and a row has the same columns in both. Either way a draft needs no rollback of its own: what
it wrote beyond the tokens that were accepted is room.
"""

from collections.abc import Sequence

from kvpool.regions import SharedWith
from kvpool.spec import CacheSpec, Draft
from kvpool.status import SpecError


def with_draft(spec: CacheSpec, draft: CacheSpec, packed: bool = True) -> CacheSpec:
    """The spec of a model together with one more draft module.

    Args:
      spec: the main model, with the modules it has so far.
      draft: the module's own layers, numbered from 0.
      packed: True puts each of its layers into the main model's group of the same region and block
        size; False gives the module groups of its own.

    Returns:
      A CacheSpec whose last layers are the module's. Main layers keep their numbers and groups.

    Raises:
      SpecError: when a packed layer has no group to ride in, or the draft has drafts itself.
    """
    for name, given in (("spec", spec), ("draft", draft)):
        if not isinstance(given, CacheSpec):
            raise SpecError(f"{name}: wanted a CacheSpec, got {type(given).__name__}")
    if draft.drafts:
        raise SpecError(f"draft: has {len(draft.drafts)} drafts itself; compose them one by one")
    if draft.pooling != spec.pooling:
        raise SpecError(f"draft: wanted pooling {spec.pooling!r}, got {draft.pooling!r}")
    if packed:
        _check_packed(spec, draft)
    first = len(spec.layers)
    layers = [*spec.layers, *(_moved(layer, first) for layer in draft.layers)]
    drafts = (*spec.drafts, Draft(len(draft.layers), packed))
    sizes = dict(spec.block_sizes)
    composed = CacheSpec.from_layers(
        layers, spec.block_size, spec.pooling, block_sizes=sizes, drafts=drafts
    )
    added = composed.groups[len(spec.groups) :]
    if not added:
        return composed
    sizes |= {
        group.name: own.block_size
        for group, own in zip(added, draft.groups, strict=True)
        if not group.is_state
    }
    return CacheSpec.from_layers(
        layers, spec.block_size, spec.pooling, block_sizes=sizes, drafts=drafts
    )


def _check_packed(spec: CacheSpec, draft: CacheSpec) -> None:
    main = part_of(spec)

    def home(group):
        return group.region, None if group.is_state else group.block_size

    homes = {home(group): group.name for group in main.groups}
    for group in draft.groups:
        if home(group) not in homes:
            entry = group.bytes_per_entry // len(group.layers)
            raise SpecError(
                f"draft layer {group.layers[0]}: keeps {group.region.retention!r}, {entry} bytes "
                f"an entry, in blocks of {group.block_size} tokens, as none of the main model's "
                f"groups {', '.join(homes.values())} does; give packed=False"
            )


def _moved(layer, by: int):
    """A layer whose shares of earlier layers count from elsewhere."""
    if isinstance(layer, SharedWith):
        return SharedWith(layer.layer + by, layer.tag)
    return {tag: _moved(r, by) for tag, r in layer.items()} if isinstance(layer, dict) else layer


def _range_of(spec: CacheSpec, module: int | None) -> range:
    """The layer numbers of a draft module, or of the main model (None)."""
    counts = [draft.layers for draft in spec.drafts]
    if module is None:
        return range(len(spec.layers) - sum(counts))
    is_number = isinstance(module, int) and not isinstance(module, bool)
    if not is_number or not 0 <= module < len(counts):
        raise SpecError(f"no draft module {module!r}; there are {len(counts)}, counted from 0")
    start = len(spec.layers) - sum(counts[module:])
    return range(start, start + counts[module])


def draft_layer(spec: CacheSpec, module: int, layer: int = 0) -> int:
    """The number in the composed spec of a draft module's layer; SpecError for one it has not."""
    numbers = _range_of(spec, module)
    is_number = isinstance(layer, int) and not isinstance(layer, bool)
    if not is_number or not 0 <= layer < len(numbers):
        raise SpecError(f"draft module {module} has layers 0 to {len(numbers) - 1}, got {layer!r}")
    return numbers[layer]


def origin_of(spec: CacheSpec, layer: int) -> tuple[int | None, int]:
    """(draft module, or None for the main model; number there) of a composed spec's layer."""
    for module in (None, *range(len(spec.drafts))):
        numbers = _range_of(spec, module)
        if layer in numbers:
            return module, numbers.index(layer)
    raise SpecError(f"no layer {layer!r}; there are 0 to {len(spec.layers) - 1}")


def project(spec: CacheSpec, values: Sequence, module: int | None = None) -> list:
    """Of one value a composed layer those of the main model, or of a draft module.

    Raises:
      SpecError: for an unknown module, or when there is not one value for every layer.
    """
    if len(values) != len(spec.layers):
        raise SpecError(
            f"values: wanted one for each of {len(spec.layers)} layers, got {len(values)}"
        )
    return [values[layer] for layer in _range_of(spec, module)]


def part_of(spec: CacheSpec, module: int | None = None) -> CacheSpec:
    """The spec of the main model alone, or of a draft module, with layers numbered from 0."""
    numbers = _range_of(spec, module)
    layers = [_moved(spec.layers[number], -numbers.start) for number in numbers]
    alone = CacheSpec.from_layers(layers, spec.block_size, spec.pooling)
    sizes = {}
    for group in alone.groups:
        number = numbers[group.layers[0]]
        homes = [spec.resolve(number, tag)[0] for tag in spec.tags(number)]
        home = next(h for h in map(spec.group, homes) if h.region == group.region)
        if not home.is_state:
            sizes[group.name] = home.block_size
    return CacheSpec.from_layers(layers, spec.block_size, spec.pooling, block_sizes=sizes)
