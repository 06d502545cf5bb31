"""Device: the same plans over `jax.experimental.transfer`, where the backend has it.

The bytes go from device to device, without frames, checksums or resuming: a peer that dies shows as
an error of the backend, after which the request is computed instead. What only has to be cut is cut
on the device.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import layers
from kvpool.transfer.offer import as_slice, places_of
from kvpool.transfer.plan import TransferPlan
from kvpool.transfer.receiver import Inbox
from kvpool.transfer.shards import Cut, Lane
from kvpool.transfer.wire import channel_of

_BYTE = np.dtype(np.uint8)


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
    """
    for source, receiver in plan.pairs:
        if source != sender:
            continue
        arrays = []
        for piece in plan.pieces(sender, receiver):
            group = plan.spec.groups[piece.group]
            here = _local(plan, group, plan.sender.context, sender // plan.sender.heads)
            data = layers.as_words(jnp.asarray(blocks[group.name]), _BYTE)
            data = data[as_slice(places_of(here, piece.items))]
            arrays.append(data if piece.lane.whole else _cut(data, piece.lane))
        server.await_pull(_uuid(plan, request, sender, receiver), arrays)


def pull(
    server, plan: TransferPlan, request: int | str, receiver: int, peers: Mapping[int, str],
    device=None,
) -> Inbox:  # fmt: skip
    """What a rank gets of a request, as a full Inbox whose blocks are on the device.

    Args:
      server: of this process.
      peers: {sender's rank: address of its server}.
    """
    device = jax.devices()[0] if device is None else device
    place = jax.sharding.SingleDeviceSharding(device)
    inbox = Inbox(plan, receiver)
    blocks = [jnp.asarray(empty, device=device) for empty in inbox.blocks]
    for sender in inbox.arrivals.outlines:
        pieces = list(plan.pieces(sender, receiver))
        shapes = [
            jax.ShapeDtypeStruct((len(p.items), p.lane.block_bytes), _BYTE, sharding=place)
            for p in pieces
        ]
        uuid = _uuid(plan, request, sender, receiver)
        for piece, data in zip(
            pieces, server.connect(peers[sender]).pull(uuid, shapes), strict=True
        ):
            places = jnp.asarray(places_of(inbox.items[piece.group], piece.items))
            blocks[piece.group] = _paste(blocks[piece.group], places, data, piece.lane)
        inbox.arrivals.here(sender)[:] = True
    inbox.blocks = blocks
    return inbox


def _uuid(plan: TransferPlan, request: int | str, sender: int, receiver: int) -> int:
    return channel_of(plan, request, sender, receiver) >> 2  # of 62 bits


def _local(plan: TransferPlan, group, context: int, way: int) -> np.ndarray:
    items = plan.items(group.name)
    return items if group.is_state else items[items % context == way]


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
