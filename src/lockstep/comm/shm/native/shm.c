/* Phases over shared memory: what the ranks of a group do between two returns to Python, without the interpreter lock.
 *
 * A collective is a *program*: rows of 64-bit numbers that Python makes (`programs.py`), which copy, add, and end phases.
 * `lockstep_run` goes through it. It returns before the end where Python has something to do: look after the other ranks
 * while it waits, explain calls that differ, find where the ranks' tensors lie, or reduce what is not added here.
 *
 * In a phase every rank writes into its send buffer, arrives, waits until all have arrived, and reads from the others'.
 * There are two send buffers per rank, used in turn, so a phase needs one wait:
 *
 *     rank 0   write A0 | arrive | wait | read A1, write B0 | arrive | wait | read B1, write A0 | ...
 *     rank 1   write A1 | arrive | wait | read A0, write B1 | arrive | wait | read B0, write A1 | ...
 *
 * A is written again only after the phase of B is over, and a rank arrives there only when it has read A.
 *
 * [Note: memory order] All ranks arrive at one counter, with an atomic addition that releases what they have written;
 * whoever reads a sum that says "all have arrived" acquires what each of them wrote before it: additions by others in
 * between continue the release sequence (C11, 5.1.2.4). Nothing else orders data between processes. The number of
 * sleepers is raised before the counter is read again, and read after the counter was raised, all of it sequentially
 * consistent: of a sleeper and a waker at least one sees the other.
 *
 * A process may be killed anywhere: it leaves an arrival more or less, or a sleeper that is none, which costs the others a
 * system call in vain and nothing else.
 */

#define _GNU_SOURCE /* syscall, clock_gettime */
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#if defined(__clang__)
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

EXPORT const char *lockstep_shm_source(void) { return LOCKSTEP_SHM_SOURCE; }

/* -- Counters: how processes wait for each other ------------------------------------------------------------------- */

typedef struct {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} Counter;

enum { SPINS_BETWEEN_CLOCKS = 32 };

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __asm__ volatile("pause" ::: "memory");
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

/* Whether a counter, which goes on from its largest value to 0, has come to `target`. */
static int has_reached(uint32_t value, uint32_t target) { return (int32_t)(value - target) >= 0; }

static void wake(Counter *counter)
{
    if (atomic_load(&counter->sleepers) != 0)
        syscall(SYS_futex, &counter->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static int has_come(Counter *counter, uint32_t target)
{
    return has_reached(atomic_load_explicit(&counter->value, memory_order_acquire), target);
}

/* Wait busily until the counter has come to `target`, at most for `spin_ns`. With `yields` another process runs on this
 * core meanwhile, if one can. */
static int spin_until(Counter *counter, uint32_t target, int64_t spin_ns, int yields)
{
    int64_t end = nanoseconds() + spin_ns;
    do {
        if (yields)
            sched_yield();
        for (int i = 0; i < (yields ? 1 : SPINS_BETWEEN_CLOCKS); i++) {
            relax();
            if (has_come(counter, target))
                return 1;
        }
    } while (nanoseconds() < end);
    return 0;
}

/* Wait asleep until the counter has come to `target`. Return 0 after `sleep_ns`, at a signal, or when another thread of
 * this process says `stop`. */
static int sleep_until(Counter *counter, uint32_t target, int64_t sleep_ns, _Atomic int32_t *stop)
{
    int reached;
    int64_t end = nanoseconds() + sleep_ns;
    atomic_fetch_add(&counter->sleepers, 1);
    for (;;) {
        uint32_t value = atomic_load(&counter->value);
        int64_t left = end - nanoseconds();
        reached = has_reached(value, target);
        if (reached || left <= 0 || atomic_load(stop))
            break;
        struct timespec limit = {left / 1000000000, left % 1000000000};
        if (syscall(SYS_futex, &counter->value, FUTEX_WAIT, value, &limit, NULL, 0) != 0 && errno == EINTR)
            break;
    }
    atomic_fetch_sub(&counter->sleepers, 1);
    return reached;
}

/* Raise a counter by one, after all that this thread has written; return the value before. */
EXPORT uint32_t lockstep_raise(Counter *counter)
{
    uint32_t before = atomic_fetch_add(&counter->value, 1);
    wake(counter);
    return before;
}

EXPORT uint32_t lockstep_read(Counter *counter)
{
    return atomic_load_explicit(&counter->value, memory_order_acquire);
}

EXPORT int lockstep_wait(Counter *counter, uint32_t target, int64_t spin_ns, int64_t sleep_ns, _Atomic int32_t *stop)
{
    return has_come(counter, target) || (spin_ns > 0 && spin_until(counter, target, spin_ns, 0)) ||
           sleep_until(counter, target, sleep_ns, stop);
}

/* Let whoever sleeps at a counter look again, a thread of this process for which `stop` was set among them. */
EXPORT void lockstep_wake(Counter *counter) { wake(counter); }

/* Order all that this thread has written before what it writes from now on, and what it has read likewise. */
EXPORT void lockstep_fence(void) { atomic_thread_fence(memory_order_seq_cst); }

/* -- Adding ---------------------------------------------------------------------------------------------------------- */

/* With the bits of torch.add: one rounding for each addition, half precision in single precision. The sign and the
 * payload of a NaN are not promised, by torch neither. The output may be an operand. */

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT8, INT16, INT32, INT64, NUM_KINDS };

static const int64_t ELEMENT_BYTES[NUM_KINDS] = {4, 8, 2, 2, 1, 2, 4, 8};

typedef void Add(void *out, const void *left, const void *right, int64_t count);

typedef union {
    float value;
    uint32_t bits;
} Float;

static inline uint16_t bfloat16_sum(uint16_t left, uint16_t right)
{
    Float l = {.bits = (uint32_t)left << 16}, r = {.bits = (uint32_t)right << 16}, sum = {.value = l.value + r.value};
    uint32_t rounded = (sum.bits + 0x7fff + ((sum.bits >> 16) & 1)) >> 16;
    return (uint16_t)(sum.value == sum.value ? rounded : 0x7fc0);
}

#define PLUS(left, right) ((left) + (right))
#define ADDITION(target, name, type, sum)                                                                              \
    target static void name(void *out, const void *left, const void *right, int64_t count)                            \
    {                                                                                                                  \
        typedef type __attribute__((aligned(1), may_alias)) Element; /* tensors may begin anywhere */                  \
        Element *o = out;                                                                                              \
        const Element *l = left, *r = right;                                                                           \
        ELEMENTWISE for (int64_t i = 0; i < count; i++) o[i] = (type)sum(l[i], r[i]);                                  \
    }
/* Unsigned, so that they wrap around. */
#define ADDITIONS(target, suffix)                                                                                      \
    ADDITION(target, add_float32_##suffix, float, PLUS)                                                                \
    ADDITION(target, add_float64_##suffix, double, PLUS)                                                               \
    ADDITION(target, add_bfloat16_##suffix, uint16_t, bfloat16_sum)                                                    \
    ADDITION(target, add_int8_##suffix, uint8_t, PLUS)                                                                 \
    ADDITION(target, add_int16_##suffix, uint16_t, PLUS)                                                               \
    ADDITION(target, add_int32_##suffix, uint32_t, PLUS)                                                               \
    ADDITION(target, add_int64_##suffix, uint64_t, PLUS)
#define LIST(suffix, float16)                                                                                          \
    {add_float32_##suffix, add_float64_##suffix, add_bfloat16_##suffix, float16,                                       \
     add_int8_##suffix,    add_int16_##suffix,   add_int32_##suffix,    add_int64_##suffix}

ADDITIONS(, plain)

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,f16c")))
ADDITIONS(AVX2, avx2)

AVX2 static void add_float16_avx2(void *out, const void *left, const void *right, int64_t count)
{
    typedef uint16_t __attribute__((aligned(1), may_alias)) Element;
    Element *o = out;
    const Element *l = left, *r = right;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 sum = _mm256_add_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(l + i))),
                                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(r + i))));
        _mm_storeu_si128((__m128i *)(o + i), _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < count; i++)
        o[i] = _cvtss_sh(_cvtsh_ss(l[i]) + _cvtsh_ss(r[i]), _MM_FROUND_TO_NEAREST_INT);
}

static Add *const PLAIN[NUM_KINDS] = LIST(plain, NULL);
static Add *const FAST[NUM_KINDS] = LIST(avx2, add_float16_avx2);

static Add *const *additions(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? FAST : PLAIN;
}
#else
#if defined(__aarch64__)
ADDITION(, add_float16, __fp16, PLUS)
static Add *const PLAIN[NUM_KINDS] = LIST(plain, add_float16);
#else
static Add *const PLAIN[NUM_KINDS] = LIST(plain, NULL);
#endif
static Add *const *additions(void) { return PLAIN; }
#endif

/* -- Multiplying ------------------------------------------------------------------------------------------------------- */

/* With the bits of torch.mul. The output may be the input. Return whether all products are finite: looking at them while
 * they are in registers costs nothing beside the memory. */
#define MULTIPLICATION(target, name, type, word, infinity)                                                             \
    target static int name(void *out, const void *in, type factor, int64_t count)                                     \
    {                                                                                                                  \
        typedef type __attribute__((aligned(1), may_alias)) Element;                                                   \
        Element *o = out;                                                                                              \
        const Element *i = in;                                                                                         \
        word largest = 0; /* of the magnitudes, which are in the order of their bits */                                \
        ELEMENTWISE for (int64_t at = 0; at < count; at++) {                                                           \
            union { type value; word bits; } product = {.value = i[at] * factor};                                      \
            word magnitude = product.bits & (word)(infinity | (infinity - 1));                                         \
            largest = magnitude > largest ? magnitude : largest;                                                       \
            o[at] = product.value;                                                                                     \
        }                                                                                                              \
        return largest < infinity;                                                                                     \
    }
#define MULTIPLICATIONS(target, suffix)                                                                                \
    MULTIPLICATION(target, multiply_float32_##suffix, float, int32_t, 0x7f800000)                                      \
    MULTIPLICATION(target, multiply_float64_##suffix, double, int64_t, 0x7ff0000000000000)

MULTIPLICATIONS(, plain)
#if defined(__x86_64__)
MULTIPLICATIONS(AVX2, avx2)
#else
#define multiply_float32_avx2 multiply_float32_plain
#define multiply_float64_avx2 multiply_float64_plain
#endif

/* Of each row, which is where the output begins, where the input does, and the number of elements. */
EXPORT int lockstep_multiply(const int64_t *rows, int64_t num_rows, double factor, int64_t kind)
{
    int is_fast = additions() != PLAIN, is_finite = 1;
    for (const int64_t *row = rows; row < rows + 3 * num_rows; row += 3) {
        void *out = (void *)(intptr_t)row[0];
        const void *in = (const void *)(intptr_t)row[1];
        if (kind == FLOAT64)
            is_finite &= (is_fast ? multiply_float64_avx2 : multiply_float64_plain)(out, in, factor, row[2]);
        else
            is_finite &= (is_fast ? multiply_float32_avx2 : multiply_float32_plain)(out, in, (float)factor, row[2]);
    }
    return is_finite;
}

/* -- Sums of bits ------------------------------------------------------------------------------------------------------ */

enum { BLOCK_WORDS = 1 << 15 }; /* as in reduce/tensor_bits.py, which says what they are for */
typedef int32_t __attribute__((aligned(1), may_alias)) Word;

#define SUMMATION(target, name)                                                                                        \
    target static uint64_t name(const Word *words, const int64_t *weights, int64_t count)                              \
    {                                                                                                                  \
        uint64_t sum = 0;                                                                                              \
        for (int64_t at = 0; at < count; at++)                                                                         \
            sum += (uint64_t)(int64_t)words[at] * (uint64_t)weights[at];                                               \
        return sum;                                                                                                    \
    }
SUMMATION(, sum_words_plain)
#if defined(__x86_64__)
SUMMATION(AVX2, sum_words_avx2)
#else
#define sum_words_avx2 sum_words_plain
#endif

/* Of each row, which is an address and a number of bytes, the sums of its blocks, one after another. */
EXPORT void lockstep_sum_blocks(const int64_t *rows, int64_t num_rows, const int64_t *weights, uint64_t *sums)
{
    int is_fast = additions() != PLAIN;
    for (const int64_t *row = rows; row < rows + 2 * num_rows; row += 2) {
        const Word *words = (const Word *)(intptr_t)row[0];
        int64_t rest = row[1] % 4;
        for (int64_t left = row[1] / 4; left > 0 || rest > 0; left -= BLOCK_WORDS, words += BLOCK_WORDS) {
            int64_t count = left < BLOCK_WORDS ? left : BLOCK_WORDS;
            uint64_t sum = (is_fast ? sum_words_avx2 : sum_words_plain)(words, weights, count);
            if (rest > 0 && count < BLOCK_WORDS) { /* the last bytes are filled up to a word with zeros */
                uint32_t word = 0;
                for (int64_t byte = 0; byte < rest; byte++)
                    word |= (uint32_t)((const uint8_t *)(words + count))[byte] << 8 * byte;
                sum += (uint64_t)(int64_t)(int32_t)word * (uint64_t)weights[count];
                rest = 0;
            }
            *sums++ = sum;
        }
    }
}

/* Whether tensors of a kind are added here. */
EXPORT int lockstep_adds(int64_t kind) { return kind >= 0 && kind < NUM_KINDS && additions()[kind] != NULL; }

/* -- Programs -------------------------------------------------------------------------------------------------------- */

/* What a row begins with, and what follows; a place is a number of a base, times 2^44, plus bytes. */
enum {
    END,    /* */
    COPY,   /* to, from, bytes */
    CALL,   /* : end the first phase of a call, in which every rank publishes its text and a location */
    PHASE,  /* : end another phase */
    PLACES, /* : return if a rank has published a location */
    REDUCE, /* length of the row, kind or -1, count, numbers of parts, steps and copies, out, parts, steps, copies */
};
/* Why it returns; NEEDS_TORCH leaves the row for the caller, who goes on behind it. */
enum { DONE, WAITING, DIFFERENT, HAS_PLACES, NEEDS_TORCH };

enum {
    PLACE_BITS = 44,
    LINE_BYTES = 64,
    TEXT = 12, /* where the text of a page begins: behind the location and the length */
    BLOCK_BYTES = 16 << 10, /* some operands and a result stay in a core's first-level cache */
    SLEEP_NS = 50000000,
    LEAST_SPIN_NS = 1000,
    MOST_SPIN_NS = 100000,
    LATE_NS = 500000, /* a spin that took longer has given its core away for a time slice */
    LEAST_PAUSE_NS = 1000000, /* for how long none is tried then; twice as long each time that it soon happens again */
    MOST_PAUSE_NS = 256000000,
};
static const int64_t NOWHERE = -1;

/* One rank's view of a group; `scratch` and `stop` are not shared. The same as `Exchange` in `phases.py`. */
typedef struct {
    Counter *counter;
    char *pages;   /* two for each rank */
    char *buffers; /* two for each rank */
    char *scratch; /* blocks */
    _Atomic int32_t *stop; /* set by another thread of this process: it waits no longer */
    char *reached; /* shared: one word for each rank, a cache line apart: in which phase it has arrived */
    int64_t page_bytes, buffer_bytes;
    int64_t size, rank;
    int64_t spin_ns;     /* how long a wait spins: longer after spins that were enough */
    int64_t spins_from;  /* on the clock: before it, a wait does not spin */
    int64_t pause_ns;    /* for how long it did not, last time */
    uint32_t arrivals;   /* what the counter says when this phase is over */
    uint32_t parity;     /* which send buffers are written to now */
    uint32_t has_arrived;
    uint32_t may_spin;
    uint32_t has_core;   /* whether there is a core for every rank */
} Exchange;

/* What is run. The same as `PreparedCall` in `phases.py`. */
typedef struct {
    Exchange *exchange;
    const int64_t *program, *table;
    const char *text; /* what the ranks compare */
    int64_t length;   /* of the text */
    int64_t location; /* where in this rank's heap its tensor lies */
    int64_t at;       /* the row where the program stands */
} PreparedCall;

static char *page_of(const Exchange *x, int64_t rank) { return x->pages + (2 * rank + x->parity) * x->page_bytes; }

/* Bases are: the send buffer of each rank that is written to now, that of each rank to be read, and the table. */
static char *resolve(const Exchange *x, const int64_t *table, int64_t place)
{
    int64_t base = place >> PLACE_BITS, offset = place & (((int64_t)1 << PLACE_BITS) - 1);
    if (base < x->size)
        return x->buffers + (2 * base + x->parity) * x->buffer_bytes + offset;
    base -= x->size;
    if (base < x->size)
        return x->buffers + (2 * base + 1 - x->parity) * x->buffer_bytes + offset;
    return (char *)(intptr_t)table[base - x->size] + offset;
}

static _Atomic uint32_t *reached_by(const Exchange *x)
{
    return (_Atomic uint32_t *)(void *)(x->reached + LINE_BYTES * x->rank);
}

/* Spin until the phase is over, about as long as that was worth it before.
 *
 * Without a core of its own a rank yields: the next rank runs at once, where to sleep and to be woken takes two system
 * calls and an interrupt of a core, ten times as long. But if a process that does not yield runs there too, it keeps the
 * core for its time slice, milliseconds; a rank that sleeps gets the core when it is woken. So waits sleep for a while. */
static void spin_for_phase(Exchange *x)
{
    int64_t start = nanoseconds();
    if (start < x->spins_from)
        return;
    int is_over = spin_until(x->counter, x->arrivals, x->spin_ns, !x->has_core);
    int64_t end = nanoseconds();
    if (!x->has_core && end - start > LATE_NS) {
        int is_again = end < x->spins_from + 4 * x->pause_ns;
        x->pause_ns = !is_again ? LEAST_PAUSE_NS : x->pause_ns * 2 < MOST_PAUSE_NS ? x->pause_ns * 2 : MOST_PAUSE_NS;
        x->spins_from = end + x->pause_ns;
    } else if (is_over)
        x->spin_ns = x->spin_ns * 2 < MOST_SPIN_NS ? x->spin_ns * 2 : MOST_SPIN_NS;
    else
        x->spin_ns = x->spin_ns / 2 > LEAST_SPIN_NS ? x->spin_ns / 2 : LEAST_SPIN_NS;
}

/* Arrive, unless that was done, and wait until all have; 0 if they have not yet. */
static int end_phase(Exchange *x)
{
    if (!x->has_arrived) {
        x->arrivals += (uint32_t)x->size;
        atomic_store_explicit(reached_by(x), x->arrivals, memory_order_relaxed); /* for the slow path only */
        if (atomic_fetch_add(&x->counter->value, 1) + 1 == x->arrivals)
            wake(x->counter);
        x->has_arrived = 1;
        if (x->may_spin && !has_come(x->counter, x->arrivals))
            spin_for_phase(x);
    }
    if (!has_come(x->counter, x->arrivals) && !sleep_until(x->counter, x->arrivals, SLEEP_NS, x->stop))
        return 0;
    x->has_arrived = 0;
    x->parity = 1 - x->parity;
    return 1;
}

static void publish(const Exchange *x, const PreparedCall *call)
{
    char *page = page_of(x, x->rank);
    int32_t short_length = (int32_t)call->length;
    memcpy(page, &call->location, sizeof call->location);
    memcpy(page + sizeof call->location, &short_length, sizeof short_length);
    memcpy(page + TEXT, call->text, (size_t)call->length);
}

/* Whether every rank has published this text in the phase that is over. All of a page is read within a page. */
static int is_same_call(Exchange *x, const PreparedCall *call)
{
    int same = 1;
    x->parity = 1 - x->parity;
    for (int64_t rank = 0; rank < x->size && same; rank++) {
        const char *page = page_of(x, rank);
        int32_t found;
        memcpy(&found, page + sizeof(int64_t), sizeof found);
        same = found == call->length && memcmp(page + TEXT, call->text, (size_t)call->length) == 0;
    }
    x->parity = 1 - x->parity;
    return same;
}

static int has_location(Exchange *x)
{
    int found = 0;
    x->parity = 1 - x->parity;
    for (int64_t rank = 0; rank < x->size; rank++)
        found |= memcmp(page_of(x, rank), &NOWHERE, sizeof NOWHERE) != 0;
    x->parity = 1 - x->parity;
    return found;
}

/* Where a step finds or leaves a block: in the result, in a part, or in scratch memory. */
static char *operand(const Exchange *x, const int64_t *table, const int64_t *row, int64_t number, int64_t offset)
{
    int64_t num_parts = row[4];
    if (number >= num_parts)
        return x->scratch + (number - num_parts) * BLOCK_BYTES;
    return resolve(x, table, number < 0 ? row[7] : row[8 + number]) + offset;
}

static void reduce(const Exchange *x, const int64_t *table, const int64_t *row)
{
    int64_t kind = row[2], count = row[3], num_parts = row[4], num_steps = row[5], num_copies = row[6];
    const int64_t *steps = row + 8 + num_parts, *copies = steps + 3 * num_steps;
    int64_t size = ELEMENT_BYTES[kind], block = BLOCK_BYTES / size;
    Add *add = additions()[kind];
    for (int64_t start = 0; start < count; start += block) {
        int64_t length = count - start < block ? count - start : block, offset = start * size;
        char *out = operand(x, table, row, -1, offset);
        if (num_steps == 0)
            memmove(out, operand(x, table, row, 0, offset), (size_t)(length * size));
        for (const int64_t *step = steps; step < copies; step += 3)
            add(operand(x, table, row, step[2], offset), operand(x, table, row, step[0], offset),
                operand(x, table, row, step[1], offset), length);
        for (int64_t i = 0; i < num_copies; i++)
            memcpy(resolve(x, table, copies[i]) + offset, out, (size_t)(length * size));
    }
}

/* Go on with a program from where it stands. */
EXPORT int lockstep_run(PreparedCall *call)
{
    Exchange *x = call->exchange;
    const int64_t *table = call->table;
    for (;;) {
        const int64_t *row = call->program + call->at;
        switch (row[0]) {
        case COPY:
            memcpy(resolve(x, table, row[1]), resolve(x, table, row[2]), (size_t)row[3]);
            call->at += 4;
            break;
        case CALL:
            if (!x->has_arrived)
                publish(x, call);
            if (!end_phase(x))
                return WAITING;
            call->at += 1;
            if (!is_same_call(x, call))
                return DIFFERENT;
            break;
        case PHASE:
            if (!end_phase(x))
                return WAITING;
            call->at += 1;
            break;
        case PLACES:
            call->at += 1;
            if (has_location(x))
                return HAS_PLACES;
            break;
        case REDUCE:
            if (row[2] < 0)
                return NEEDS_TORCH;
            reduce(x, table, row);
            call->at += row[1];
            break;
        default:
            return DONE;
        }
    }
}

/* Take back the arrival of this rank, which will not go on: the others must not find the phase over. 0 if it is over. */
EXPORT int lockstep_withdraw(Exchange *x)
{
    if (!x->has_arrived)
        return 0;
    uint32_t value = atomic_load(&x->counter->value);
    while (!has_reached(value, x->arrivals))
        if (atomic_compare_exchange_weak(&x->counter->value, &value, value - 1)) {
            x->has_arrived = 0;
            x->arrivals -= (uint32_t)x->size;
            atomic_store_explicit(reached_by(x), x->arrivals, memory_order_relaxed);
            return 1;
        }
    return 0;
}
