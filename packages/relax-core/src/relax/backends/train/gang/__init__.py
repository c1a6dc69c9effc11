"""A trainer of many ranks behind the verbs of one.

The leader is rank 0 and lives in the Actor's process: it cuts each micro-batch into equal rounds, tells every
rank what to do, does its own part, and adds up what comes back. The other ranks are processes that answer
verbs. A verb travels over a gloo group of its own; that a rank failed or died is told over tethers, plain TCP
connections that outlive every collective.
"""
