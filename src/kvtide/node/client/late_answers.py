"""What a node has granted with an answer that came too late, and how that is given back.

A caller waits for an answer for a limited time, and then goes on as if there were no node. The node does not know that:
when it gets to the request it does it, and with its answer may grant something that nobody will use or end. So when the
answer comes at last, whatever it grants is given back:

- a session, a holding, a reservation, a membership in a crew, a worker's use of a right: closed, released, aborted,
  resigned, left. A reservation for workers is aborted in the same way.
- the right to hear the end of a load or a flush: cancelled, because the caller has cancelled its own. Drops, expiries
  and the forgetting of a tenant are done all the same. Their callers were told that they may or may not be.
- pins: unpinned, because the caller was told that nothing was pinned.

Answers that grant nothing (``Found``, ``Collected`` of a holding, statistics) are ignored. What gives back or sets
something (``Release``, ``Finish``, ``Close``, ``Leave``, ``Resign``, ``Cancel``, ``Forget``, ``Unmapped``, ``Follow``,
``Invite``) is done in its order, and its answer matters to nobody.
"""

from __future__ import annotations

from kvtide.node import protocol as p

__all__ = ["giving_back"]


def giving_back(operation: p.Operation, answer: p.Answer) -> p.Operation | None:
    """What must be sent to the node because it answered that operation so, and nobody has the answer."""
    match operation, answer:
        case p.Open(), int():
            return p.Close(answer)
        case p.Match(), p.Matched():
            return p.Release(operation.session, [answer.holding])
        case p.Reserve(), p.Reserved():
            return p.Finish(operation.session, answer.reservation, False)
        case p.Reserve(after=int(after)), p.Failure():  # then it was not sealed, and its owner believes that it was
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
