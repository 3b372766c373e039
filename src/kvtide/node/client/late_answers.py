"""Gives back what a node has granted with an answer that came too late.

A caller waits for an answer for a limited time, and then continues as if there were no node. The node does not know
that: it still executes the request, and its answer may grant something that no caller will use or end. So when the
answer arrives at last, everything that it grants is given back:

- a session, a prefix lease, a reservation, a membership in a worker group, a worker's use of a right: closed, released,
  aborted, resigned, left. A reservation for workers is aborted in the same way.
- the notice of the end of a load or a flush: cancelled, because the caller has cancelled its own operation. Drops,
  expiries and the forgetting of a tenant are still executed. Their callers got the result that this is unknown.
- pins: unpinned, because the caller got the result that nothing was pinned.

Answers that grant nothing (``Found``, ``Collected`` of a lease, statistics) are ignored. Operations that give back or
set something (``Release``, ``Finish``, ``Close``, ``Leave``, ``Resign``, ``Cancel``, ``EndEarlierRights``,
``Unmapped``, ``Follow``, ``Invite``) are executed in their order, and their answers are not needed.
"""

from __future__ import annotations

from kvtide.node import protocol as p

__all__ = ["giving_back"]


def giving_back(operation: p.Operation, answer: p.Answer) -> p.Operation | None:
    """The operation that gives back what ``answer`` granted, if the caller of ``operation`` did not get the answer."""
    match operation, answer:
        case p.Open(), int():
            return p.Close(answer)
        case p.Match(), p.Matched():
            return p.Release(operation.session, [answer.holding])
        case p.Reserve(), p.Reserved():
            return p.Finish(operation.session, answer.reservation, False)
        case p.Reserve(after=int(after)), p.Failure():  # it was not sealed, and its owner assumes that it was
            return p.Finish(operation.session, after, True)
        case ((p.Load() | p.Flush()), int()):
            return p.Cancel(answer)
        case p.Pin(step=step), int() if step > 0 and answer:
            return p.Pin(operation.session, operation.digests, operation.stop, -1)
        case p.Join(), p.Joined():
            return p.Resign(answer.member)
        case p.Visit(), p.Collected():
            return p.Leave(operation.member, [operation.holding], False)
        case p.Fill(), p.Reserved():
            return p.Leave(operation.member, [operation.reservation], False)
    return None
