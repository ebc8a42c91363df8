"""Processes that watch each other by files, so that none waits in a collective for ever.

    RUN/processes/ATTEMPT/3.json   what process 3 says of itself, and of those below it

      1.json .. 15.json                          ─► process 0 ─► 0.json, which all read
      17.json .. 31.json ─► process 16 ─► 16.json ─┘

Each process writes one file, its parent in a tree reads it, and everybody reads that of process 0: three
files opened per process and turn, however many there are. What travels up the tree is a `Digest`, which does not
grow with the number of processes; everybody judges the same one.

    beat      what a process says of itself        digest   what is known of many, and how two of these add up
    tree      who reads whom, and how often        judge    from a digest to what is wrong
    stop      how all stop after the same step     facts    what must be the same everywhere
    watchdog  one process's part in all of this, without a thread; `jaxpar.train.watchdog.thread` gives it one
"""
