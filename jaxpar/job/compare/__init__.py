"""`jaxpar exchange compare`: trains one job with several exchanges and shows them side by side on one page.

    methods  parses the methods of the command line: exchanges, which run, and methods simulated on a virtual clock
    trained  trains the job by each method: loss against samples, bytes and virtual seconds
    page     one HTML file

Nouns: a method, a curve.
"""
