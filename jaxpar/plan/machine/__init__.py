"""The machines that a plan is made for, what they reach of their data sheets, and how a program uses them."""
