/* The hot loops of a delta, for one core: decode, and touch each changed value once.
 *
 * Freestanding: no library, no state, no allocation. The caller (kernel.py) owns every buffer and calls
 * `dcs_last` on gaps before they lead anywhere. Little-endian, any alignment. What numpy does in its place
 * gives the same bits; a test holds them against each other.
 */
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* Bumped with every change of a signature: kernel.py refuses any other. */
enum { ABI = 1 };
/* Forms of values, as in format.py. */
enum { WIDE = 1, NARROW = 2, CODES = 3 };
/* Bytes of a range that are asked for, then changed, in one go: half of a first cache. */
enum { TURN = 16384 };
enum { ESCAPE = -128, SEE_NARROW = 3 };

typedef uint16_t __attribute__((aligned(1), may_alias)) u16;
typedef uint32_t __attribute__((aligned(1), may_alias)) u32;
typedef uint64_t __attribute__((aligned(1), may_alias)) u64;

INLINE uint32_t load(const uint8_t *from, uint32_t unit) {
    return unit == 1 ? *from : unit == 2 ? *(const u16 *)from : *(const u32 *)from;
}

INLINE void store(uint8_t *to, uint32_t value, uint32_t unit) {
    if (unit == 1)
        *to = (uint8_t)value;
    else if (unit == 2)
        *(u16 *)to = (uint16_t)value;
    else
        *(u32 *)to = value;
}

EXPORT uint32_t dcs_abi(void) { return ABI; }

/* The position that gaps of `width` bytes lead to; -1 when one but the first is 0. */
EXPORT int64_t dcs_last(const uint8_t *gaps, uint32_t width, uint32_t count) {
    uint64_t sum = 0;
    uint32_t zeros = 0;
    if (width == 1)
        for (uint32_t i = 0; i < count; i++)
            sum += gaps[i], zeros += gaps[i] == 0;
    else
        for (uint32_t i = 0; i < count; i++)
            sum += load(gaps + 2 * (uint64_t)i, 2), zeros += load(gaps + 2 * (uint64_t)i, 2) == 0;
    return zeros > (count && load(gaps, width) == 0) ? -1 : (int64_t)sum;
}

INLINE uint32_t code_at(const uint8_t *codes, uint32_t i) { return codes[i / 4] >> 2 * (i % 4) & 3; }

/* Escapes among `count` codes of two bits. */
INLINE uint32_t escaped_codes(const uint8_t *codes, uint32_t count) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < count / 4; i++) {
        uint32_t both = codes[i] & codes[i] >> 1 & 0x55;
        both = (both & 0x33) + (both >> 2 & 0x33);
        found += (both & 15) + (both >> 4);
    }
    for (uint32_t i = count / 4 * 4; i < count; i++)
        found += code_at(codes, i) == SEE_NARROW;
    return found;
}

INLINE uint32_t escaped_bytes(const uint8_t *narrow, uint32_t count) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++)
        found += (int8_t)narrow[i] == ESCAPE;
    return found;
}

/* What a code stands for; 0 for an escape. */
INLINE uint32_t meaning(uint32_t code) { return (uint32_t)(int32_t)(int8_t)(0x00ff01 >> 8 * code); }

/* A signed byte, or the next of `wide` where it stands for that. */
INLINE uint32_t widened(uint8_t small, const uint8_t **wide, uint32_t unit) {
    if (__builtin_expect((int8_t)small != ESCAPE, 1))
        return (uint32_t)(int32_t)(int8_t)small;
    uint32_t value = load(*wide, unit);
    *wide += unit;
    return value;
}

/* The counts of escapes have been checked. One code in ten may be one, too many to be foretold: all codes are
 * looked up as if there were none, then the escapes alone are gone through. */
INLINE void decode_codes(const uint8_t *codes, const uint8_t *narrow, const uint8_t *wide, uint32_t unit,
                         uint32_t count, uint8_t *restrict out) {
    uint32_t i = 0;
    if (unit == 2)
        for (; i + 4 <= count; i += 4) {
            /* Four codes at once, one in the low bits of each 16: 0 becomes 1, 1 becomes -1, the others 0. */
            uint64_t ones = 0x0001000100010001, lanes = codes[i / 4] * 0x0000040010004001 & 3 * ones;
            uint64_t plus = ones & ~lanes & ~(lanes >> 1), minus = ones & lanes & ~(lanes >> 1);
            *(u64 *)(out + 2 * (uint64_t)i) = plus | minus * 0xffff;
        }
    for (; i < count; i++)
        store(out + (uint64_t)i * unit, meaning(code_at(codes, i)), unit);
    for (i = 0; i + 32 <= count; i += 32) {
        uint64_t word = *(const u64 *)(codes + i / 4);
        for (uint64_t left = word & word >> 1 & 0x5555555555555555; left; left &= left - 1) {
            uint64_t at = i + (uint32_t)__builtin_ctzll(left) / 2;
            store(out + at * unit, widened(*narrow++, &wide, unit), unit);
        }
    }
    for (; i < count; i++)
        if (code_at(codes, i) == SEE_NARROW)
            store(out + (uint64_t)i * unit, widened(*narrow++, &wide, unit), unit);
}

INLINE void decode(const uint8_t *codes, const uint8_t *narrow, const uint8_t *wide, uint32_t unit, uint32_t count,
                   uint8_t *restrict out) {
    if (codes)
        decode_codes(codes, narrow, wide, unit, count, out);
    else
        for (uint32_t i = 0; i < count; i++)
            store(out + (uint64_t)i * unit, widened(narrow[i], &wide, unit), unit);
}

/* `count` differences into `out`; 0 when there are more or fewer escapes than values for them. */
EXPORT int dcs_decode(uint32_t form, const uint8_t *codes, const uint8_t *narrow, uint32_t narrows, const uint8_t *wide,
                      uint32_t wides, uint32_t unit, uint32_t count, uint8_t *out) {
    if (form == WIDE) {
        if (wides != count || narrows)
            return 0;
        for (uint64_t i = 0; i < (uint64_t)count * unit; i++)
            out[i] = wide[i];
        return 1;
    }
    if (narrows != (form == CODES ? escaped_codes(codes, count) : count) || wides != escaped_bytes(narrow, narrows))
        return 0;
    if (form == NARROW)
        codes = 0;
    if (unit == 1)
        decode(codes, narrow, wide, 1, count, out);
    else if (unit == 2)
        decode(codes, narrow, wide, 2, count, out);
    else
        decode(codes, narrow, wide, 4, count, out);
    return 1;
}

/* Changed values on their way into a range. */
struct walk {
    const uint8_t *gaps;
    uint8_t *values;
    uint32_t width, count;
    uint32_t asked, end, done;      /* changes whose line was asked for, that are due, that were made */
    uint64_t ahead, position;       /* of the last that was asked for, and made */
};

enum what { ADD, PUT, TAKE };

/* What was asked for is due now; ask for the lines of the changes below `limit`. */
INLINE void ask(struct walk *w, const uint8_t *target, const uint8_t *source, uint64_t limit, uint32_t width,
                uint32_t unit) {
    uint32_t asked = w->asked;
    uint64_t ahead = w->ahead;
    w->end = asked;
    for (; asked < w->count; asked++) {
        uint64_t next = ahead + load(w->gaps + (uint64_t)asked * width, width);
        if (next >= limit)
            break;
        ahead = next;
        /* Into the second cache: the first has too few places for so many misses at a time. */
        __builtin_prefetch(target + ahead * unit, 0, 2);
        if (source)
            __builtin_prefetch(source + ahead * unit, 0, 2);
    }
    w->asked = asked, w->ahead = ahead;
}

/* Make the changes that are due. ADD: values += target, and back; PUT: into target; TAKE: source into target. */
INLINE void make(struct walk *w, enum what what, uint8_t *target, const uint8_t *source, uint32_t width, uint32_t unit) {
    uint64_t position = w->position;
    for (uint32_t i = w->done; i < w->end; i++) {
        position += load(w->gaps + (uint64_t)i * width, width);
        uint8_t *at = target + position * unit, *value = w->values + (uint64_t)i * unit;
        if (what == TAKE)
            store(at, load(source + position * unit, unit), unit);
        else if (what == PUT)
            store(at, load(value, unit), unit);
        else {
            uint32_t sum = load(at, unit) + load(value, unit);
            store(at, sum, unit);
            store(value, sum, unit);
        }
    }
    w->done = w->end, w->position = position;
}

INLINE void step(struct walk *w, enum what what, uint8_t *target, const uint8_t *source, uint64_t limit, uint32_t unit) {
    if (w->width == 1) {
        ask(w, target, source, limit, 1, unit);
        make(w, what, target, source, 1, unit);
    } else {
        ask(w, target, source, limit, 2, unit);
        make(w, what, target, source, 2, unit);
    }
}

/* Both walks in turn, or `now` alone: a line that both touch is fetched once, and one turn before it is needed. */
INLINE void run(struct walk *before, struct walk *now, enum what what, uint8_t *target, const uint8_t *source,
                uint32_t unit) {
    uint64_t turn = TURN / unit;
    for (uint64_t limit = turn; now->done < now->count || (before && before->done < before->count); limit += turn) {
        if (before)
            step(before, PUT, target, 0, limit, unit);
        step(now, what, target, source, limit, unit);
    }
}

/* Add `values` to what `gaps` name of `target`, and leave the sums in both. Before that, put the values of an
 * earlier change there (`stale` of them). */
EXPORT void dcs_add(const uint8_t *gaps, uint32_t width, uint32_t count, uint8_t *values, const uint8_t *stale_gaps,
                    uint32_t stale_width, uint32_t stale, uint8_t *stale_values, uint32_t unit, uint8_t *target) {
    struct walk now = {gaps, values, width, count, 0, 0, 0, 0, 0};
    struct walk before = {stale_gaps, stale_values, stale_width, stale, 0, 0, 0, 0, 0};
    struct walk *old = stale ? &before : 0;
    if (unit == 1)
        run(old, &now, ADD, target, 0, 1);
    else if (unit == 2)
        run(old, &now, ADD, target, 0, 2);
    else
        run(old, &now, ADD, target, 0, 4);
}

/* Put `values` to what `gaps` name of `target`, or, with a source, what that has there. */
EXPORT void dcs_put(const uint8_t *gaps, uint32_t width, uint32_t count, uint8_t *values, const uint8_t *source,
                    uint32_t unit, uint8_t *target) {
    struct walk all = {gaps, values, width, count, 0, 0, 0, 0, 0};
    enum what what = source ? TAKE : PUT;
    if (unit == 1)
        run(0, &all, what, target, source, 1);
    else if (unit == 2)
        run(0, &all, what, target, source, 2);
    else
        run(0, &all, what, target, source, 4);
}
