"""Exit statuses of the command line; scripts rely on them.

0  done                      2  wrong usage
1  an input is broken,       3  refused: --embed host or --check on a source that is not eligible
   or an operation failed  130  interrupted
                           141  whoever read the output has closed the pipe, as of a tool that SIGPIPE ends
"""

DONE, FAILED, USAGE, REFUSED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141
