// Threads for the C++ kernels. A step of a model is hundreds of regions, tens of microseconds each and a few apart: helpers look out for the
// next one for a moment before they sleep, since to be woken costs more than a region. Whoever starts a region never waits for a helper that
// has not begun: where other processes have the cores it does the work alone.
#include "cpu_thread_pool.h"

#include <sched.h>
#include <stdint.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr auto LOOK_OUT = std::chrono::microseconds(100);  // longer than the gaps within a step
constexpr int POLLS_BETWEEN_YIELDS = 64;
constexpr int MAX_HELPERS = 1 << 14;
// Of the state word: helpers inside, is the region open, how many helpers it takes, its number.
constexpr uint64_t INSIDE = 0xffff, OPEN = 1 << 16, HELPERS = 1 << 17, REGION = 1ull << 32;

inline void relax(int polls) {
    if (polls % POLLS_BETWEEN_YIELDS == 0) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Pool {
    std::atomic<uint64_t> state{0};
    void (*work)(void*) = nullptr;
    void* data = nullptr;
    std::atomic<int> num_asleep{0};
    std::mutex busy, sleeping;
    std::condition_variable wake;
    int num_helpers = 0;

    void help(uint64_t index) {
        uint64_t seen, region = 0;  // the last region that this helper has looked at
        auto is_new = [&] { return ((seen = state.load()) & OPEN) && seen / REGION != region; };
        for (;;) {
            const auto give_up = std::chrono::steady_clock::now() + LOOK_OUT;
            for (int polls = 1; !is_new(); polls++) {
                relax(polls);
                if (polls % POLLS_BETWEEN_YIELDS || std::chrono::steady_clock::now() < give_up) continue;
                std::unique_lock<std::mutex> lock(sleeping);
                num_asleep++;
                wake.wait(lock, is_new);
                num_asleep--;
                break;
            }
            if (index >= seen / HELPERS % MAX_HELPERS) {
                region = seen / REGION;
                continue;
            }
            // Succeeds only while the region is open; its owner then waits, so `work` and `data` are those of this region.
            if (!state.compare_exchange_strong(seen, seen + 1)) continue;
            region = seen / REGION;
            work(data);
            state--;
        }
    }

    void run(void (*w)(void*), void* d, uint64_t helpers) {
        for (; num_helpers < (int)helpers; num_helpers++) std::thread(&Pool::help, this, num_helpers).detach();
        work = w, data = d;
        state = (state / REGION + 1) * REGION | helpers * HELPERS | OPEN;
        if (num_asleep) {
            std::lock_guard<std::mutex> lock(sleeping);
            wake.notify_all();
        }
        w(d);
        state &= ~OPEN;
        for (int polls = 1; state & INSIDE; polls++) relax(polls);
    }
};

}  // namespace

EXPORT void cpu_run_on_threads(void (*work)(void*), void* data, int num_threads) {
    static Pool& pool = *new Pool;  // never destroyed: its threads outlive main
    // A second thread of the process that computes at the same time does so alone.
    std::unique_lock<std::mutex> lock(pool.busy, std::try_to_lock);
    if (num_threads < 2 || num_threads > MAX_HELPERS || !lock.owns_lock()) work(data);
    else pool.run(work, data, (uint64_t)num_threads - 1);
}
