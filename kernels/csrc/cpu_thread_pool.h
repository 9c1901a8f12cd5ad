// How a kernel gets its threads: the one pool of the process (cpu_thread_pool.cpp), passed in as a function.
#pragma once

// Calls work(data) on this thread and on up to num_threads - 1 others, which may start late or not at all: `work` takes its tasks from a
// counter in `data` until none is left. Returns when nobody is inside any more.
typedef void (*RunOnThreads)(void (*work)(void*), void* data, int num_threads);
