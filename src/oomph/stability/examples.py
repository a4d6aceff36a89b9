"""A batch, any tree of tensors -> how many examples it has, where they are, and some of them.

Examples are counted by the rows of the first tensor outside any list that has more than one row;
else by the entries of a list of examples; else by the rows of tensors in lists. The example
dimension is the first, unless it is given or found by trying the candidates from `layouts`. A
workload's batch function makes batches of two sizes: the dimension that grows holds the examples.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import rnn

from oomph.errors import UsageError

WHOLE = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.device, torch.dtype)

# The example dimension: one for all tensors, or by name. None passes a tensor whole to every piece.
BatchDim = int | Mapping[str, int | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Dims:
    """The example dimension of each tensor in a batch, by name."""

    named: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    others: int = 0

    def of(self, path: str, num_dims: int) -> int | None:
        """Return the example dimension; None if every piece gets the whole tensor."""
        if path in self.named:
            dim = self.named[path]
            return dim if dim is None or dim >= 0 else dim + num_dims
        return self.others if -num_dims <= self.others < num_dims else 0


FIRST = Dims()


def dims_given(batch_dim: BatchDim | None) -> Dims:
    """Return the dimensions that the user gave. Raises UsageError."""
    if batch_dim is None:
        return FIRST
    if isinstance(batch_dim, int) and not isinstance(batch_dim, bool):
        return Dims(others=batch_dim)
    if isinstance(batch_dim, Mapping):
        named = {str(name): dim for name, dim in batch_dim.items()}
        if all(dim is None or isinstance(dim, int) for dim in named.values()):
            return Dims(named)
    raise UsageError(
        f"batch_dim={batch_dim!r:.60} is not a dimension",
        attempt='batch_dim=1, or by name: {"source": 1, "mask": None}, where None means not split',
    )


# ---- counting examples -------------------------------------------------------------------------


def num_examples(batch: Any, whole: Collection[str] = (), dims: Dims = FIRST) -> int:
    """Return the number of examples, ignoring what `whole` names. Raises UsageError."""
    if dims is not FIRST:
        found = _size_by(batch, whole, dims)
        if found is not None:
            return found
        whole = {*whole, *(path for path, dim in dims.named.items() if dim is None)}
    rest = _without(batch, whole)
    found = _first_size(rest) or _length_of_list(rest) or _size_in_list(rest)
    if found is not None:
        return found
    raise UsageError(
        f"a batch of {type(batch).__name__} cannot be split",
        because="no tensor or list of examples was found in it",
        attempt="a dict, tuple or dataclass of tensors; or split=function, count=function",
    )


def _size_by(batch: Any, whole: Collection[str], dims: Dims) -> int | None:
    """Return the number of rows of the first tensor whose dimension was given."""
    found = dict(named_tensors(batch, whole))
    given: Iterable[tuple[torch.Tensor | None, int | None]] = (
        (found.get(path), dim) for path, dim in dims.named.items() if path not in whole
    )
    if not dims.named and dims.others:
        given = ((tensor, dims.others) for tensor in found.values())
    for tensor, dim in given:
        if tensor is not None and dim is not None and -tensor.dim() <= dim < tensor.dim():
            return tensor.size(dim)
    return None


def are_entries_of_lists(batch: Any, whole: Collection[str] = ()) -> bool:
    """Return whether lists hold the examples; they are then split, whatever their entries."""
    rest = _without(batch, whole)
    return not _first_size(rest) and _length_of_list(rest) is not None


def elements_per_example(batch: Any, num: int) -> int:
    """Return the size of an example, which grows with tokens per sequence or pixels per image.

    Tensors with one number per example (a class, an index, a length) say nothing about it.
    """
    each = [tensor.numel() // max(num, 1) for tensor in tensors(batch)]
    return sum(size for size in each if size > 1) or sum(each)


def has_examples(part: Any, num: int) -> bool:
    """Return whether a tensor or an array has this many rows."""
    if isinstance(part, torch.Tensor):
        return part.dim() > 0 and part.size(0) == num
    shape: Any = getattr(part, "shape", None)
    return isinstance(shape, tuple) and shape[:1] == (num,)


def _first_size(part: Any) -> int | None:
    """Return the rows of the first tensor outside lists, which may hold one per example."""
    if isinstance(part, torch.Tensor):
        return part.size(0) if part.dim() else None
    if isinstance(part, dict):  # by far the most common
        return _first_of(map(_first_size, part.values()))
    if isinstance(part, rnn.PackedSequence):
        return int(part.batch_sizes[0])
    shape: Any = getattr(part, "shape", None)
    if hasattr(part, "__array__") and shape:
        return int(shape[0])
    return _first_of(map(_first_size, _columns(part)))


def _first_of(sizes: Iterator[int | None]) -> int | None:
    """Return the first size above 1: a single row is shared by all, unless all have one."""
    found = None
    for size in sizes:
        if size and size > 1:
            return size
        found = found or size
    return found


def _length_of_list(part: Any) -> int | None:
    """Return the length of the first list of non-tensors (texts, dicts, pairs) or unlike tensors.

    Tensors of the same kind are columns in [x, y], which is what default_collate makes. They are
    examples in {"x": [...], "y": [...]} and in ([...], [...]), which it never makes.
    """
    if isinstance(part, list) and part and not hasattr(part, "_fields"):
        rows = {each.shape[:1] for each in part if isinstance(each, torch.Tensor)}
        if len(rows) > 1 or all(map(_is_one_example, part)):
            return len(part)
    inside = part if isinstance(part, list | tuple) else _columns(part)
    found = next(filter(None, map(_length_of_list, inside)), None)
    return found if found or isinstance(part, list) else _length_of_lists(inside)


def _length_of_lists(columns: Sequence[Any]) -> int | None:
    """Return the common length of two or more lists of tensors; None if they differ."""
    lists = [each for each in columns if isinstance(each, list) and each]
    lengths = {len(each) for each in lists}
    is_each_of_tensors = all(isinstance(one, torch.Tensor) for each in lists for one in each)
    return lengths.pop() if len(lists) > 1 and len(lengths) == 1 and is_each_of_tensors else None


def _is_one_example(part: Any) -> bool:
    """Return whether it is one example: a text, a number, a dict, a pair, an object."""
    if isinstance(part, str | int | float | Mapping):
        return True
    is_column = isinstance(part, torch.Tensor | list | rnn.PackedSequence)
    return not (is_column or part is None or hasattr(part, "__array__"))


def _size_in_list(part: Any) -> int | None:
    """Return the rows of the first tensor in a list, such as default_collate makes from pairs."""
    for each in part if isinstance(part, list | tuple) else _columns(part):
        found = _first_size(each) if not isinstance(each, list) else None
        found = found or _size_in_list(each)
        if found is not None:
            return found
    return None


def _without(part: Any, whole: Collection[str], path: str = "") -> Any:
    """Return the rest of a batch, without `whole`; containers with named parts become dicts."""
    prefix = f"{path}." if path else ""
    parts = _parts(part)
    is_sequence = isinstance(part, list | tuple)
    if not whole or not parts:
        return part
    if is_sequence and not any(f"{prefix}{number}" in whole for number in parts):
        return part
    left = {name: each for name, each in parts.items() if f"{prefix}{name}" not in whole}
    return {name: _without(each, whole, f"{prefix}{name}") for name, each in left.items()}


# ---- finding the example dimension -------------------------------------------------------------

_MOST_LAYOUTS = 12  # judgement: each is tried with a few examples, the likeliest first


def layouts(batch: Any, whole: Collection[str] = ()) -> list[tuple[Dims, int]]:
    """Return candidate dimensions to split along and their numbers of examples, likeliest first.

    A number of examples explains a tensor that has a dimension of that size. Integer tensors are
    never passed whole on a guess: they may index into what is split.
    """
    first = num_examples(batch, whole)
    named = named_tensors(batch, whole, listed=first)
    found = {path: tensor for path, tensor in named if tensor.dim() and tensor.shape != (1,)}
    if are_entries_of_lists(batch, whole) or not found:
        return [(FIRST, first)]
    sizes = dict.fromkeys(size for t in found.values() for size in t.shape[:2] if size > 1)
    others = sorted(sizes.keys() - {first}, key=lambda num: _num_unexplained(found, num))
    made = [(named, num) for num in (first, *others) for named in _named_dims(found, num)]
    return [
        (FIRST if set(named.values()) == {0} else Dims(named), num)
        for named, num in made[:_MOST_LAYOUTS]
    ]


def _num_unexplained(found: Mapping[str, torch.Tensor], num: int) -> int:
    return sum(num not in tensor.shape[:3] and tensor.size(0) != 1 for tensor in found.values())


def _named_dims(found: Mapping[str, torch.Tensor], num: int) -> Iterator[dict[str, int | None]]:
    """Yield candidate dimensions by name. Tensors of one shape and dtype are split alike."""
    kinds: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for path, tensor in found.items():
        kinds.setdefault((tensor.shape, tensor.dtype), []).append(path)
    choices = [_choices(shape, dtype, num) for shape, dtype in kinds]
    if not all(choices):
        return
    ranked = sorted(
        itertools.product(*(range(len(each)) for each in choices)), key=lambda at: (sum(at), at)
    )
    for places in ranked[: 4 * _MOST_LAYOUTS]:
        dims = [each[place] for each, place in zip(choices, places, strict=True)]
        if any(dim is not None for dim in dims):
            yield {p: dim for dim, paths in zip(dims, kinds.values(), strict=True) for p in paths}


def _choices(shape: torch.Size, dtype: torch.dtype, num: int) -> list[int | None]:
    dims: list[int | None] = [dim for dim, size in enumerate(shape[:3]) if size == num]
    may_be_indices = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    if shape[0] == 1:
        return [None, *dims]
    # Masks and weights have one or two dimensions; a tensor with more is training data.
    is_input = bool(dims) and len(shape) > 2
    return dims if may_be_indices or is_input else [*dims, None]


def grown(shape: torch.Size, num: int, other: torch.Size, num_other: int) -> tuple[int, int] | None:
    """Return the one dimension that grows with the number of examples, and its rows per example.

    None if the shapes differ in any other respect.
    """
    different = [d for d, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
    if len(shape) != len(other) or len(different) != 1:
        return None
    dim = different[0]
    rows_each = other[dim] // num_other
    is_of_examples = other[dim] == rows_each * num_other and shape[dim] == rows_each * num
    return (dim, rows_each) if is_of_examples and rows_each else None


# ---- a few examples of a workload --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Examples:
    """A batch that can be split."""

    whole: Any
    num: int
    # By path: the example dimension and rows per example; None: a list of examples.
    axes: Mapping[str, tuple[int, int] | None]
    notes: tuple[str, ...] = ()
    cannot_split: str | None = None  # the reason, if it cannot be split

    def piece(self, start: int, stop: int) -> Any:
        """Return the examples from `start` to `stop`, as a batch."""

        def cut(path: str, leaf: Any) -> Any:
            if path not in self.axes:
                return leaf
            axis = self.axes[path]
            if axis is None:
                return leaf[start:stop]
            dim, rows = axis
            return leaf.narrow(dim, start * rows, (stop - start) * rows)

        return mapped(self.whole, cut, self.is_divided)

    def is_divided(self, path: str, _: Any) -> bool:
        return path in self.axes


def take(batch: Any, num: int, seed: int = 0) -> Examples:
    """Return `num` examples, or as many as a given batch has. Raises UsageError."""
    return _made(batch, num, seed) if callable(batch) else _given(batch, num)


def _made(batch: Callable[[int], Any], num: int, seed: int) -> Examples:
    """Return the examples that a batch function makes; what grows with their number holds them."""
    whole, fewer = (_seeded(batch, size, seed) for size in (num, num - 2))
    axes: dict[str, tuple[int, int] | None] = {}
    lengths: dict[str, int] = {}

    def note_length(path: str, node: Any) -> bool:
        if isinstance(node, list | tuple):
            lengths[path] = len(node)
        return False

    def is_list(path: str, node: Any) -> bool:
        """Return whether it has one item per example."""
        is_so = isinstance(node, list | tuple) and len(node) == num
        if is_so and lengths.get(path) == num - 2:
            axes[path] = None
        return path in axes

    others = dict(leaves(fewer, note_length))
    for path, leaf in leaves(whole, is_list):
        other = others.get(path)
        if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if leaf.shape != other.shape:
            axes[path] = grown(other.shape, num - 2, leaf.shape, num)
            if axes[path] is None:
                reason = f"batch{path} has shape {list(leaf.shape)} for {num} examples"
                return Examples(whole, num, {}, cannot_split=reason)
    if not axes:
        raise UsageError(
            f"batch({num}) does not have {num} examples",
            because="nothing in it grows with the number of examples",
            attempt='batch=lambda n: {"x": torch.randn(n, 3, 224, 224), "y": ...}',
        )
    return Examples(whole, num, axes)


def _seeded(batch: Callable[[int], Any], num: int, seed: int) -> Any:
    torch.manual_seed(seed)
    return batch(num)


def _given(batch: Any, num: int) -> Examples:
    """Return the first rows of a batch given as an example. Raises UsageError."""
    rows = [leaf for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not rows:
        raise UsageError("the workload's batch has no tensors", because=f"it is {batch!r:.80}")
    # The first tensor may be something else (class weights), so take the most common size.
    sizes = [len(tensor) for tensor in rows]
    has = max(set(sizes), key=sizes.count)
    axes: dict[str, tuple[int, int] | None] = {}

    def is_list(path: str, node: Any) -> bool:
        is_so = isinstance(node, list | tuple) and len(node) == has
        if is_so and not any(isinstance(item, torch.Tensor) and item.dim() for item in node):
            axes[path] = None
        return path in axes

    for path, leaf in leaves(batch, is_list):
        if isinstance(leaf, torch.Tensor) and has_examples(leaf, has):
            axes[path] = (0, 1)
    num = min(num, has)
    return Examples(Examples(batch, has, axes).piece(0, num), num, axes)


_SHAPES_ONLY = "the batch's examples are all alike: made-up values were used instead"


def with_values(examples: Examples, *, integers: bool) -> Examples:
    """Fill constant tensors with made-up values; return the batch unchanged if examples differ.

    A batch may be only a shape, such as torch.zeros returns. `integers`: zeros also become 0 and 1,
    which are a valid token and class in nearly every model.
    """
    if not _are_alike(examples):
        return examples
    generator = torch.Generator().manual_seed(0)

    def filled(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or path not in examples.axes or not leaf.numel():
            return leaf
        if leaf.is_floating_point() and bool((leaf == leaf.flatten()[0]).all()):
            return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        if integers and leaf.dtype in (torch.int64, torch.int32) and not leaf.any():
            return torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.dtype)
        return leaf

    whole = mapped(examples.whole, filled, examples.is_divided)
    return dataclasses.replace(examples, whole=whole, notes=(_SHAPES_ONLY,))


def _are_alike(examples: Examples) -> bool:
    """Return whether the last example equals the first."""
    first, last = (
        dict(leaves(examples.piece(place, place + 1))) for place in (0, examples.num - 1)
    )
    found = [path for path, _ in leaves(examples.whole, examples.is_divided)]
    tensors = [path for path in found if isinstance(first.get(path), torch.Tensor)]
    return bool(tensors) and all(torch.equal(first[path], last[path]) for path in tensors)


# ---- trees of dicts, lists, tuples, dataclasses and objects ------------------------------------

IsLeaf = Callable[[str, Any], bool]


def _parts(part: Any) -> Mapping[Any, Any]:
    """Return the parts of a batch, by key, field, index or attribute."""
    if isinstance(part, Mapping):
        return part
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    if isinstance(part, list | tuple):
        return dict(enumerate(part))
    is_plain = isinstance(part, (*WHOLE, torch.Tensor))
    return {} if is_plain else dict(getattr(part, "__dict__", {}))


def _columns(part: Any) -> list[Any]:
    """Return the parts of a tuple or of a container with named parts."""
    return [] if isinstance(part, list) else list(_parts(part).values())


def tensors(part: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a batch."""
    if isinstance(part, torch.Tensor):
        yield part
    for each in _parts(part).values():
        yield from tensors(each)


def named_tensors(
    part: Any, whole: Collection[str] = (), path: str = "", listed: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every dense tensor, named as in `whole` and `batch_dim`.

    listed: lists of this length hold one entry per example and are skipped.
    """
    if path in whole and path:
        return
    is_listed = listed is not None and isinstance(part, list) and len(part) == listed
    if is_listed and not all(has_examples(each, len(part)) for each in part):
        return
    if isinstance(part, torch.Tensor) and part.layout is torch.strided and not part.is_nested:
        yield path, part
    if isinstance(part, rnn.PackedSequence):
        return
    prefix = f"{path}." if path else ""
    for name, each in _parts(part).items():
        yield from named_tensors(each, whole, f"{prefix}{name}", listed)


def mapped(
    tree: Any, change: Callable[[str, Any], Any], is_leaf: IsLeaf | None = None, path: str = ""
) -> Any:
    """Return a tree of the same types with its leaves changed."""
    children = _children(tree, is_leaf, path)
    if not children:
        return change(path, tree)
    new = {key: mapped(value, change, is_leaf, at) for key, (at, value) in children.items()}
    if isinstance(tree, Mapping):
        made: Any = copy.copy(tree)  # a BatchEncoding stays a BatchEncoding
        for key, value in new.items():
            made[key] = value
        return made
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(**new)
    if isinstance(tree, list | tuple):
        return type(tree)(new.values())
    return dataclasses.replace(tree, **new)


def leaves(tree: Any, is_leaf: IsLeaf | None = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path as Python code: `["x"][0].labels`."""
    children = _children(tree, is_leaf, path)
    if not children:
        yield path, tree
    for at, child in children.values():
        yield from leaves(child, is_leaf, at)


def _children(tree: Any, is_leaf: IsLeaf | None, path: str) -> dict[Any, tuple[str, Any]]:
    """Return key -> path and child; none for a leaf, as are objects other than dataclasses."""
    if isinstance(tree, torch.Tensor) or (is_leaf is not None and is_leaf(path, tree)):
        return {}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        named = zip(tree._fields, tree, strict=True)
        return {name: (f"{path}.{name}", value) for name, value in named}
    if isinstance(tree, Mapping | list | tuple):
        return {key: (f"{path}[{key!r}]", value) for key, value in _parts(tree).items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {name: (f"{path}.{name}", value) for name, value in _parts(tree).items()}
    return {}
