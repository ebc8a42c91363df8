"""Processes that watch each other's heartbeats in files, so that none waits in a collective for ever.

    RUN/processes/ATTEMPT/3.json   heartbeat of process 3, with a digest of those below it

      1.json .. 15.json                          ─► process 0 ─► 0.json, which all read
      17.json .. 31.json ─► process 16 ─► 16.json ─┘

Each process writes one file, its parent in a tree reads it, and all read that of process 0: three files are opened per
process and turn, however many processes there are. A `Digest` travels up the tree, whose size does not grow with the
number of processes; all judge the same one. Files, not sockets: a run has a shared folder anyway, and a process that
hangs or is stopped needs no connection to be noticed.

    beat      the heartbeat of a process            digest   the state of many processes, and how two digests add up
    tree      who reads whose file, how often       judge    from a digest to the process at fault
    stop      how all stop after the same step      facts    values that must be equal on all processes
    watchdog  the part of one process in all this, without a thread; `jaxpar.train.watchdog.thread` gives it one
"""
