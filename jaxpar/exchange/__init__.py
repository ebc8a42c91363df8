"""How replicas of a model agree, and the collectives by which they do, as tables of messages.

    base         the protocol of an exchange: what happens to gradients, to parameters every so many steps, what is sent
    between      where replicas meet: their mean, by XLA or by a table of messages
    all_reduce   the default: gradients are summed in every step
    averaging/   replicas that differ, and meet every so many steps
    population/  members that see the same examples, with other settings of their optimizer
    compressed/  gradients that travel as codes
    low_rank/    gradients that travel as products of thin matrices
    clock/       stale gradients, simulated: what is applied when, on a virtual clock
    collectives/ collectives as rounds of messages: replayed on numbers, run on devices, priced
    table        the exchanges that a job may name

Nouns: `Exchange` (a frozen value), `Replicas` where they meet, `Between` them a mesh axis, what is `Sent` (the noun
`Collective`, which the ledger has too), an algorithm (rounds of messages).

To add an exchange: a file with a frozen dataclass that is an `Exchange`, and a row of `table.EXCHANGES` (or `with
added(name, kind)`, for as long as a test or a script runs). Say whether replicas `differ` and after how many steps
they `agree`; the step, checkpoints, jobs, plans and the inspector read it from there. To add an all-reduce: see
`collectives`.
"""
