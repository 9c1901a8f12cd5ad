// The draw of one row on the CPU. The generator runs over batches of tokens, for the compiler to vectorise.
#include "exponential_race.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

static const int kBatch = 256;

// levels [size], as `winners` of kernels/exponential_race.py takes them. Returns the token, or -1 where every level is out of the race.
EXPORT int64_t cpu_winner(const int32_t* levels, int64_t size, const int64_t* keys, const int32_t* table) {
    const race::Keys row = race::read_keys(keys);
    race::First first;
    uint32_t quads[kBatch];
    race::Words bits[kBatch];
    const int64_t num_whole = size / 4;
    for (int64_t next = 0; next * 4 < size;) {
        int count = 0;
        for (; next < num_whole && count < kBatch; next++) {
            const int32_t* x = levels + next * 4;
            quads[count] = (uint32_t)next;
            count += ((uint32_t)x[0] <= first.limit) | ((uint32_t)x[1] <= first.limit) | ((uint32_t)x[2] <= first.limit) |
                     ((uint32_t)x[3] <= first.limit);
        }
        if (next == num_whole && count < kBatch) quads[count++] = (uint32_t)next++;  // the rest, if there is any
        for (int i = 0; i < count; i++) bits[i] = race::token_bits(row, quads[i]);
        for (int i = 0; i < count; i++) {
            const int64_t token = quads[i] * 4ll;
            for (int j = 0; j < 4 && token + j < size; j++) first.offer(table, (uint32_t)levels[token + j], bits[i].x[j], (uint32_t)token + j);
        }
    }
    return first.arrival == ~0ull ? -1 : (int64_t)(uint32_t)first.arrival;
}
