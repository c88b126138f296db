"""Links between events: launch -> device work, backward -> forward, and the process an event belongs to."""

import numpy as np
import numpy.typing as npt

from z3trace.analyzers.load.fields import NULL

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]


def process_scopes(
    pid: Int32, on_device: npt.NDArray[np.bool_], calls: Rows, work: Rows, correlation: Int64, start: Int64
) -> Int32:
    """The host process that each event belongs to, as a code of `pid`.

    Events of a host process belong to it. In a file of several ranks ids collide: the work of a device belongs to
    the host process whose calls explain most of it, with the shortest median delay from call to work. Where ids
    collide even on one device, because the ranks' devices have the same number, each activity goes to the call
    that came last before it.
    """
    scope: Int32 = pid.copy()
    hosts = np.unique(pid[calls])
    if len(hosts) == 0:
        return scope
    if len(hosts) == 1:
        scope[on_device] = hosts[0]
        return scope
    for device in np.unique(pid[on_device]).tolist():
        rows = work[pid[work] == device]
        delays = np.stack([_delays(rows, calls[pid[calls] == host], correlation, start) for host in hosts])
        explained = (delays < _NEVER).sum(axis=1)
        medians = [
            np.median(of[of < _NEVER]) if count else _NEVER
            for of, count in zip(delays, explained, strict=True)
        ]
        best = max(range(len(hosts)), key=lambda i: (explained[i] * 20 // max(len(rows), 1), -medians[i]))
        scope[on_device & (pid == device)] = hosts[best]
        if len(np.unique(correlation[rows])) < len(rows):
            nearest = delays.argmin(axis=0)
            linked = delays.min(axis=0, initial=_NEVER) < _NEVER
            scope[rows[linked]] = hosts[nearest[linked]]
    return scope


_NEVER = 2**62


def _delays(work: Rows, calls: Rows, correlation: Int64, start: Int64) -> Int64:
    """From the call with the same correlation id to each activity, ns; _NEVER without one or if it came later."""
    launch = match_keys(correlation[work], correlation[calls], calls)
    delay = start[work] - start[launch]
    return np.where((launch >= 0) & (delay >= 0), delay, _NEVER)


def match_keys(wanted: Int64, keys: Int64, rows: Rows) -> Int64:
    """For each wanted key the first of `rows` (which carry `keys`) with the same key; -1 for none."""
    found = np.full(len(wanted), -1, np.int64)
    if not len(keys) or not len(wanted):
        return found
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    at = np.searchsorted(ordered, wanted, "left")
    at[at == len(ordered)] = 0
    hit = ordered[at] == wanted
    found[hit] = rows[order[at[hit]]]
    return found


def launches(scope: Int32, correlation: Int64, calls: Rows, work: Rows, size: int) -> Int32:
    """For each event the row of the runtime call that launched it, -1 for none."""
    result = np.full(size, -1, np.int32)
    calls = calls[(correlation[calls] != NULL) & (correlation[calls] != 0)]
    work = work[(correlation[work] != NULL) & (correlation[work] != 0)]
    if not len(calls) or not len(work):
        return result
    keys, wanted = _scoped(scope, correlation, calls, work)
    result[work] = match_keys(wanted, keys, calls)
    return result


def _scoped(scope: Int32, key: Int64, left: Rows, right: Rows) -> tuple[Int64, Int64]:
    """Keys of both sides, made distinct between scopes where there are several."""
    if len(np.unique(scope[left])) <= 1 and len(np.unique(scope[right])) <= 1:
        return key[left], key[right]
    both = np.concatenate((left, right))
    _, dense = np.unique(key[both], return_inverse=True)
    combined = dense.astype(np.int64) * (int(scope.max()) + 1) + scope[both]
    return combined[: len(left)], combined[len(left) :]


def forward_ops(
    scope: Int32, sequence: Int64, fwd_thread: Int64, start: Int64, ops: Rows, size: int
) -> Int32:
    """For each backward operator its forward operator, -1 for none.

    An operator is backward when it names the thread of its forward (`Fwd thread id` above 0). Nested forward
    operators share a sequence number; as in torch, the one that starts last created the backward node.
    """
    result = np.full(size, -1, np.int32)
    ops = ops[(sequence[ops] != NULL) & (sequence[ops] >= 0)]
    backward = fwd_thread[ops] > 0
    forward_rows, backward_rows = ops[~backward], ops[backward]
    if not len(forward_rows) or not len(backward_rows):
        return result
    latest_first = forward_rows[np.argsort(-start[forward_rows], kind="stable")]
    keys, wanted = _scoped(scope, sequence, latest_first, backward_rows)
    result[backward_rows] = match_keys(wanted, keys, latest_first)
    return result


def by_key(scope: Int32, key: Int64, owners: Rows, users: Rows, size: int) -> Int32:
    """For each of `users` the first of `owners` with the same key in the same process, -1 for none."""
    result = np.full(size, -1, np.int32)
    if len(owners) and len(users):
        keys, wanted = _scoped(scope, key, owners, users)
        result[users] = match_keys(wanted, keys, owners)
    return result
