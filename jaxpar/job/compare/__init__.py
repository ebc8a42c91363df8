"""`jaxpar exchange compare`: one job, trained by several ways to agree, and one page that shows them side by side.

    methods  what is written on the command line: exchanges that run, and methods that are simulated
    trained  each of them trained: loss against samples, bytes and virtual seconds
    page     one HTML file

Nouns: a method, a curve.
"""
