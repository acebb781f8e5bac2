"""Seconds of one block of each class under a strategy, from its amounts and the constants of device kind and stack."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from costmodel.device_kind import DeviceKind
from costmodel.kernels import kernels_s
from costmodel.stack import Reruns, Stack
from planner.strategy.links import AxisLinks
from planner.strategy.strategy import RematPolicy
from planner.strategy.work import ClassWork, Floats, MoveKey, Work, reruns_full

AXES = ("cp", "tp", "ep")  # axes of the mesh that work is captured on, in order
DATA, EXPERT_DATA = "dp", "edp"  # the axis before them where replicas compute together; beside ``ep`` the latter


@dataclass(frozen=True)
class ClassTimes:
    """Seconds of one block for one microbatch: compute and collectives inside the replica, by pass.

    Attributes:
        weight_s: of the backward pass, what only weight gradients need.
        comm_s: of forward_s and backward_s, what collectives take, by axis.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    comm_s: Mapping[str, float]


def class_times(
    work: Work,
    kind: DeviceKind,
    stack: Stack,
    links: AxisLinks,
    axes: tuple[str, ...],
    remat: RematPolicy,
    *,
    overlap: bool = False,
    slowdown: float = 1.0,
) -> dict[str, ClassTimes]:
    """Times by class.

    Args:
        axes: names of the mesh axes of `work`, in order.
        overlap: whether collectives of these axes run beside compute.
        slowdown: how many times as long the devices' kernels take as the kind's.
    """
    return {key: _times(one, kind, stack, links, axes, remat, overlap, slowdown) for key, one in work.classes.items()}


def _times(
    one: ClassWork,
    kind: DeviceKind,
    stack: Stack,
    links: AxisLinks,
    axes: tuple[str, ...],
    remat: RematPolicy,
    overlap: bool,
    slowdown: float,
) -> ClassTimes:
    if stack.misaligned_efficiency is not None:
        kind = msgspec.structs.replace(kind, misaligned_efficiency=stack.misaligned_efficiency)
    k = one.kernels
    if len(k.matmul_s) == 0:
        return ClassTimes(0.0, 0.0, 0.0, {})
    memory_s = np.where(k.matmul_s > 0.0, k.memory_s, k.memory_s * stack.traffic)
    slower = stack.attention * kind.matmul_efficiency / kind.attention_efficiency
    matmul_s = np.where(one.flash, k.matmul_s * slower, k.matmul_s)
    seconds = kernels_s(matmul_s, k.vector_s, memory_s, k.launches, k.dims, k.misaligned, kind) * slowdown
    forward = float(seconds[~one.backward].sum())
    backward = float(seconds[one.backward].sum())
    weight = float((seconds * one.weight).sum())
    rerun, again_moves = _run_again(one, remat, stack.reruns)
    again = float(seconds[rerun].sum())
    if stack.host_launch_s:
        launched = np.where(k.launches > 0, k.launches, 0.0) * stack.host_launch_s
        forward = max(forward, float(launched[~one.backward].sum()))
        backward = max(backward, float(launched[one.backward].sum()))
        again = max(again, float(launched[rerun].sum()) if remat == "full" else 0.0)
    comm = {"forward": 0.0, "backward": 0.0}
    by_axis: dict[str, float] = {}
    for (phase, kind_name, axis), (moved, starts) in again_moves:
        took = links.seconds(kind_name, axes[axis], float(moved), float(starts))
        comm[phase] += took
        by_axis[axes[axis]] = by_axis.get(axes[axis], 0.0) + took
    if overlap:  # what is left of collectives that run beside the block's own compute
        for phase, busy in (("forward", forward), ("backward", backward + again)):
            left = max(0.0, comm[phase] - stack.tensor_overlap * busy) / comm[phase] if comm[phase] else 0.0
            comm[phase] *= left
        took = sum(by_axis.values())
        shrink = sum(comm.values()) / took if took else 0.0
        by_axis = {name: took * shrink for name, took in by_axis.items()}
    return ClassTimes(forward + comm["forward"], backward + again + comm["backward"], weight, by_axis)


def _run_again(
    one: ClassWork, remat: RematPolicy, reruns: Reruns
) -> tuple[NDArray[np.bool_], list[tuple[MoveKey, Floats]]]:
    """Which kernels of the forward pass run again, and the collectives of both passes with those that do."""
    rows = {name: list(zip(moves.keys, moves.amounts, strict=True)) for name, moves in one.moves.items()}
    if not reruns_full(one, remat, reruns):
        again = one.core if remat == "selective" else np.zeros_like(one.core)
        return again, rows["none"]
    if reruns != "whole_layers":
        return one.again, rows["full"]
    repeated = [(("backward", kind, axis), row) for (phase, kind, axis), row in rows["none"] if phase == "forward"]
    return ~one.backward, [*rows["none"], *repeated]
