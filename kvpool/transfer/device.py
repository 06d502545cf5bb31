"""Device: the same plans over `jax.experimental.transfer`, where the backend has it.

The bytes go from device to device, without frames, checksums or resuming: a peer that dies shows as
an error of the backend, after which the request is computed instead. What only has to be cut is cut
on the device. What both sides must have alike is pulled first. The backend knows no end of waiting:
a request that is never served is waited for, so let the sender say first that it serves it.
"""

import functools
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import layers
from kvpool.status import SpecError
from kvpool.transfer.agreement import Agreement, Disagreement
from kvpool.transfer.keys import checked_request
from kvpool.transfer.offer import as_slice, local_items, places_of
from kvpool.transfer.plan import TransferPlan
from kvpool.transfer.receiver import Inbox
from kvpool.transfer.shards import Cut, Lane, rank_groups
from kvpool.transfer.wire import channel_of

_BYTE = np.dtype(np.uint8)
_STATED = 1 << 16  # bytes of what a sender states: whoever pulls has to know the size


def start_server(host: str = "127.0.0.1", port: int = 0, device=None):
    """A transfer server of the backend of `device`; port 0 takes a free one.

    It asks nobody for a token: another host than loopback is for a network of one's own.

    Raises:
      NotImplementedError: where this jax or this backend has none; use the TCP path.
    """
    device = jax.devices()[0] if device is None else device
    try:
        from jax.experimental import transfer

        return transfer.start_transfer_server(device.client, f"{host}:{port}", [f"{host}:0"])
    except (ImportError, AttributeError, RuntimeError) as error:
        raise NotImplementedError(
            f"no transfer server for {device.platform} in jax {jax.__version__}: {error}"
        ) from error


def serve(
    server, plan: TransferPlan, request: int | str, sender: int, blocks: Mapping[str, jax.Array]
) -> None:
    """Lets every receiver pull what one rank sends it, once.

    Args:
      blocks: {group: u[K, W]} of all the plan's items on this rank, as `export_blocks` gives them.

    Raises:
      SpecError: for a rank that there is not, a request that no key can have, blocks that are
        missing or not as many or as large as the rank's items.
    """
    plan.sender.check_rank(sender, "sender")
    request, here = checked_request(request), local_items(plan, plan.sender, sender)
    data = _checked(plan, here, blocks)
    for source, receiver in plan.pairs:
        if source != sender:
            continue
        arrays = []
        for piece in plan.pieces(sender, receiver):
            places = places_of(here[piece.group], piece.items)
            of_piece = data[piece.group][as_slice(places)]
            arrays.append(of_piece if piece.lane.whole else _cut(of_piece, piece.lane))
        server.await_pull(_uuid(request, sender, receiver), [jnp.asarray(_stated(plan))])
        server.await_pull(_uuid(request, sender, receiver, plan), arrays)


def pull(
    server, plan: TransferPlan, request: int | str, receiver: int, peers: Mapping[int, str],
    device=None,
) -> Inbox:  # fmt: skip
    """What a rank gets of a request, as a full Inbox whose blocks are on the device.

    Args:
      server: of this process.
      peers: {sender's rank: address of its server}.

    Raises:
      Disagreement: where a sender has another plan, with what differs; then its blocks stay.
      SpecError: as `serve`; for a sender without an address.
    """
    device = jax.devices()[0] if device is None else device
    place = jax.sharding.SingleDeviceSharding(device)
    request, inbox = checked_request(request), Inbox(plan, receiver)
    inbox.check_peers(peers)
    blocks = [jnp.asarray(empty, device=device) for empty in inbox.blocks]
    for sender in inbox.arrivals.outlines:
        peer = server.connect(peers[sender])
        form = jax.ShapeDtypeStruct((_STATED,), _BYTE, sharding=place)
        (stated,) = peer.pull(_uuid(request, sender, receiver), [form])
        _agree(plan, np.asarray(stated))
        pieces = list(plan.pieces(sender, receiver))
        shapes = [
            jax.ShapeDtypeStruct((len(p.items), p.lane.block_bytes), _BYTE, sharding=place)
            for p in pieces
        ]
        arrays = peer.pull(_uuid(request, sender, receiver, plan), shapes)
        for piece, data in zip(pieces, arrays, strict=True):
            places = jnp.asarray(places_of(inbox.items[piece.group], piece.items))
            blocks[piece.group] = _paste(blocks[piece.group], places, data, piece.lane)
        jax.block_until_ready(blocks)
        inbox.arrivals.here(sender)[:] = True
    inbox.blocks = blocks
    return inbox


def _uuid(request: int | str, sender: int, receiver: int, plan: TransferPlan | None = None) -> int:
    """Of 62 bits: of what is stated about a plan, or of the bytes of a plan."""
    return channel_of(plan, request, sender, receiver) >> 2


def _stated(plan: TransferPlan) -> np.ndarray:
    """u8[_STATED] of what a receiver compares with its own."""
    said = {"digest": plan.digest, "num_tokens": plan.num_tokens}
    whole = json.dumps({**said, "agreement": plan.agreement.to_dict()}).encode()
    text = whole if len(whole) <= _STATED else json.dumps(said).encode()
    return np.frombuffer(text.ljust(_STATED), np.uint8)


def _agree(plan: TransferPlan, stated: np.ndarray) -> None:
    there = json.loads(stated.tobytes())
    if "agreement" in there:
        plan.agreement.settle(Agreement.from_dict(there["agreement"]))
    if there["digest"] != plan.digest:
        raise Disagreement(
            f"no transfer: plans differ: {plan.num_tokens} tokens here, {there['num_tokens']} there"
        )


def _checked(plan: TransferPlan, here: list[np.ndarray], blocks) -> list[jax.Array]:
    """For each group its blocks u8[K, bytes]; SpecError unless they are the rank's items."""
    found = []
    groups = rank_groups(plan.spec, plan.sender.heads)
    for group, items in zip(groups, here, strict=True):
        wanted = len(items), group.bytes_per_block
        data = blocks.get(group.name)
        data = None if data is None else layers.as_words(jnp.asarray(data), _BYTE)
        if data is None or data.shape != wanted:
            got = "nothing" if data is None else f"u8{list(data.shape)}"
            raise SpecError(f"blocks[{group.name!r}]: wanted u8{list(wanted)}, got {got}")
        found.append(data)
    return found


def _bytes_of(cuts: tuple[Cut, ...], at_sender: bool) -> np.ndarray:
    """The byte of a layer i64[layer_bytes] that each byte on the way is or becomes."""
    found = []
    for cut in cuts:
        start, stride = (
            (cut.source, cut.source_stride) if at_sender else (cut.target, cut.target_stride)
        )
        runs = start + np.arange(cut.repeats)[:, None] * stride
        found.append((runs + np.arange(cut.run)).reshape(-1))
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnums=1)
def _cut(blocks: jax.Array, lane: Lane) -> jax.Array:
    """u8[K, lane.block_bytes] of a sender's blocks u8[K, bytes]."""
    of_layers = blocks.reshape(-1, lane.layers, lane.source_layer)
    sent = of_layers[:, :, _bytes_of(lane.cuts, at_sender=True)]
    return sent.reshape(-1, lane.block_bytes)


@functools.partial(jax.jit, static_argnums=3)
def _paste(blocks: jax.Array, places: jax.Array, data: jax.Array, lane: Lane) -> jax.Array:
    """Blocks u8[M, bytes] of a receiver with what came for `places` i64[K]."""
    of_layers = blocks[places].reshape(-1, lane.layers, lane.target_layer)
    data = data.reshape(-1, lane.layers, lane.layer_bytes)
    of_layers = of_layers.at[:, :, _bytes_of(lane.cuts, at_sender=False)].set(data)
    return blocks.at[places].set(of_layers.reshape(len(places), -1))
