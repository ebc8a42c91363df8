"""`jaxpar exchange compare`: trains one job with several exchanges and shows them side by side on one page.

    parse_methods   parses the methods of the command line: exchanges, which run, and methods simulated on a virtual
                    clock; finds the next global batch that all of them divide
    training        trains the job by each method: loss against samples, bytes and virtual seconds
    thread_races    trains the job by threads that update shared parameters without locks
    curves_page     one HTML file

Terms: a method, a curve.
"""
