"""Looking into a running coordinator: HTTP for programs, ``dcs top`` for people, a bar for transfers.

`IntrospectionServer` answers ``/topology``, ``/versions``, ``/metrics`` and ``/healthz`` from a thread of the
coordinator's process. All of it is made from one `dcs.control.views.Topology`. Prometheus' format needs the
extra ``metrics`` and the live table the extra ``top``; both are imported when used.
"""

from dcs.introspection.endpoint import IntrospectionServer

__all__ = ["IntrospectionServer"]
