/* A copy of one version into the spare buffer, past the caches: nobody on this core reads it again soon.
 *
 * An ordinary store fetches the line it overwrites first, a third of all traffic; memcpy spares that for very
 * large blocks alone, and a model is many small ones. Eight pages are read at once, as the prefetcher of a core
 * ends at the end of a page and small pages are what torch's and shared memory are made of.
 * Freestanding: no library, no state. x86-64 only; streaming.py does without elsewhere.
 */
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* Bumped with every change of a signature: streaming.py refuses any other. */
enum { ABI = 1 };
enum { LINE = 64, PAGE = 4096, PAGES = 8 };

typedef long long quads __attribute__((vector_size(16)));
typedef long long loose __attribute__((vector_size(16), aligned(1), may_alias));

EXPORT uint32_t dcs_streaming_abi(void) { return ABI; }

/* Two lines, `to` aligned to one. */
INLINE void lines(uint8_t *to, const uint8_t *from) {
    quads read[8];
    for (int i = 0; i < 8; i++)
        read[i] = *(const loose *)(from + 16 * i);
    for (int i = 0; i < 8; i++)
        __builtin_ia32_movntdq((quads *)(to + 16 * i), read[i]);
}

INLINE void bytes(uint8_t *to, const uint8_t *from, uint64_t count) {
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
}

INLINE void stream(uint8_t *to, const uint8_t *from, uint64_t count) {
    uint64_t head = -(uint64_t)to & (LINE - 1);
    if (count < head + 2 * LINE) {
        bytes(to, from, count);
        return;
    }
    if (head) {
        bytes(to, from, head);
        to += head, from += head, count -= head;
    }
    for (; count >= PAGES * PAGE; to += PAGES * PAGE, from += PAGES * PAGE, count -= PAGES * PAGE)
        for (uint32_t at = 0; at < PAGE; at += 2 * LINE)
            for (uint32_t page = 0; page < PAGES; page++)
                lines(to + page * PAGE + at, from + page * PAGE + at);
    for (; count >= 2 * LINE; to += 2 * LINE, from += 2 * LINE, count -= 2 * LINE)
        lines(to, from);
    if (count)
        bytes(to, from, count);
}

/* `count` ranges that do not overlap: nbytes[i] bytes at address from[i] to address to[i]. */
EXPORT void dcs_stream(uint64_t count, const uint64_t *to, const uint64_t *from, const uint64_t *nbytes) {
    for (uint64_t i = 0; i < count; i++)
        stream((uint8_t *)(uintptr_t)to[i], (const uint8_t *)(uintptr_t)from[i], nbytes[i]);
    __asm__ volatile("sfence" : : : "memory");
}
