"""Processes watch each other's heartbeat files, so that none waits forever in a collective.

    RUN/processes/ATTEMPT/3.json   heartbeat of process 3, with a digest of the processes below it in the tree

      1.json .. 15.json                          ─► process 0 ─► 0.json, which all processes read
      17.json .. 31.json ─► process 16 ─► 16.json ─┘

In each turn, every process writes its own file, its parent in the tree reads that file, and all processes read the file
of process 0: three opened files per process, whatever the number of processes. The files carry a `Digest` of fixed size
up the tree, and all processes decide on the same digest. Files are used instead of sockets because a run has a shared
folder anyway, and a hanging or stopped process is noticed without a connection to it.

    beat       the heartbeat of a process and its file
    digest     the state of many processes in a fixed size, and the sum of two digests
    decisions  the process at fault, values that must be equal on all processes, the step after which all stop
    watchdog   the tree, and the turns of one process, without a thread
    thread     runs the turns of a `Watchdog` in a thread; the training loop uses it
"""
