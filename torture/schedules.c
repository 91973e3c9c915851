/* Ranks as threads run programs of programs.py through shm.c, with yields, sleeps and signals at random points, and
 * compare what they get with a single thread's results. `schedules.py` writes the programs, compiles this and starts it:
 *
 *     schedules FILE SEED SECONDS
 *
 * A session is a group of 2 to 8 ranks and some of these: texts that differ, withdrawn arrivals, waits that have no end
 * (so that a lost wake-up hangs), all ranks told to stop. Its counter often begins near 2^32.
 */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <errno.h>

/* -- What shm.c finds instead of atomics, memcpy and system calls ------------------------------------------------- */

static _Thread_local uint64_t random_state = 1;
static _Thread_local int is_disturbed; /* the thread of a rank, within shm.c */
static int waits_are_endless;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545f4914f6cdd1d >> 11;
}

static uint64_t below(uint64_t limit) { return next_random() % limit; }

static void seed_random(uint64_t seed, uint64_t a, uint64_t b, uint64_t c)
{
    random_state = (seed * 1000003 + a) * 0x9e3779b97f4a7c15 + b * 0xd1b54a32d192ed03 + c * 0x94d049bb133111eb + 1;
    if (random_state == 0)
        random_state = 1;
    for (int i = 0; i < 8; i++)
        next_random();
}

static void disturb(void)
{
    if (!is_disturbed)
        return;
    uint64_t chosen = below(256);
    if (chosen == 0) {
        struct timespec pause = {0, (long)below(200000)};
        nanosleep(&pause, NULL);
    } else if (chosen < 24)
        sched_yield();
}

static long disturbed_syscall(long number, void *word, int operation, uint32_t value, const struct timespec *limit)
{
    disturb();
    if (operation == FUTEX_WAIT && !waits_are_endless && below(4) == 0) {
        errno = EINTR;
        return -1;
    }
    return syscall(number, word, operation, value, waits_are_endless && operation == FUTEX_WAIT ? NULL : limit, NULL, 0);
}

#undef atomic_load
#undef atomic_fetch_add
#undef atomic_fetch_sub
#define atomic_load(object) (disturb(), atomic_load_explicit(object, memory_order_seq_cst))
#define atomic_fetch_add(object, value) (disturb(), atomic_fetch_add_explicit(object, value, memory_order_seq_cst))
#define atomic_fetch_sub(object, value) (disturb(), atomic_fetch_sub_explicit(object, value, memory_order_seq_cst))
/* Not where one element is copied. */
#define memcpy(to, from, size) ((__builtin_constant_p(size) ? (void)0 : disturb()), memcpy(to, from, size))
#define syscall(number, word, operation, value, limit, ...) disturbed_syscall(number, word, operation, value, limit)
#define LOCKSTEP_SHM_SOURCE ""
#include "shm.c"
#undef memcpy
#undef syscall

/* -- Cases: what a call is, and what it must give ------------------------------------------------------------------ */

#ifndef HANG_SECONDS
#define HANG_SECONDS 60
#endif
enum { MOST_RANKS = 8, MOST_GIVEN = 24, PROGRAMS = 4, PAGE_BYTES = 4096, MOST_BYTES = 1 << 18 };
/* Programs of a rank: the call; the same where its tensor lies in the group's memory; then, if some rank's does, in
 * place, or after the call. The last three may be absent. */
enum { FROM_OUTSIDE, FROM_GROUP, IN_PLACE, AFTER_CALL };

typedef struct {
    int64_t num_given, given_bytes[MOST_GIVEN];
    const int64_t *programs[PROGRAMS];
    int64_t num_scratch;
} RankCase;

typedef struct {
    int64_t size, buffer_bytes, kind, compares, num_results;
    RankCase ranks[MOST_RANKS];
    const int64_t *results; /* rows: length, rank, given, offset, count, parts, steps, 3 for each part, 3 for each step */
} Case;

static Case *cases;
static int64_t num_cases;

static void fail(const char *format, int64_t a, int64_t b, int64_t c);

static void read_cases(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0)
        exit(2);
    long length = ftell(file);
    int64_t *at = malloc((size_t)length);
    rewind(file);
    if (at == NULL || fread(at, 1, (size_t)length, file) != (size_t)length)
        exit(2);
    fclose(file);
    num_cases = *at++;
    cases = calloc((size_t)num_cases, sizeof *cases);
    for (int64_t number = 0; number < num_cases; number++) {
        Case *each = &cases[number];
        each->size = *at++;
        each->buffer_bytes = *at++;
        each->kind = *at++;
        each->compares = *at++;
        for (int64_t rank = 0; rank < each->size; rank++) {
            RankCase *own = &each->ranks[rank];
            own->num_given = *at++;
            for (int64_t i = 0; i < own->num_given; i++)
                own->given_bytes[i] = *at++;
            own->num_scratch = *at++;
            for (int i = 0; i < PROGRAMS; i++) {
                int64_t rows = *at++;
                own->programs[i] = rows ? at : NULL;
                at += rows;
            }
        }
        each->num_results = *at++;
        each->results = at;
        for (int64_t i = 0; i < each->num_results; i++)
            at += at[0];
    }
}

/* -- A session ------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t seed;
    int64_t size, num_calls, buffer_bytes;
    char *memory;
    uint32_t begin;
    int may_withdraw, may_differ, will_stop;
    _Atomic int32_t stop;
    char *heap[MOST_RANKS]; /* what given 0 of each rank is */
} Session;

typedef struct {
    Session *session;
    int64_t rank;
} Member;

static Session *current;
static _Atomic int64_t total_calls, total_withdrawn, total_different, total_stopped, total_sleeps;

static void fail(const char *format, int64_t a, int64_t b, int64_t c)
{
    printf("wrong: session %llu of %lld ranks: ", (unsigned long long)current->seed, (long long)current->size);
    printf(format, (long long)a, (long long)b, (long long)c);
    printf("\n");
    fflush(stdout);
    _exit(1);
}

/* Fill memory with numbers of a kind, no NaN among them, the same whenever it is asked for. */
static void fill(char *memory, int64_t bytes, int64_t kind, uint64_t seed, int64_t call, int64_t rank, int64_t given)
{
    uint64_t kept = random_state;
    seed_random(seed, (uint64_t)call, (uint64_t)rank, (uint64_t)given);
    uint64_t mask = kind == FLOAT32    ? 0xbfffffffbfffffff
                    : kind == FLOAT64  ? 0xbfffffffffffffff
                    : kind == BFLOAT16 || kind == FLOAT16 ? 0xbfffbfffbfffbfff
                                       : ~(uint64_t)0;
    uint64_t pattern[509]; /* as long as no segment or block, and copied, because that is quick under a sanitizer */
    for (int i = 0; i < 509; i++)
        pattern[i] = (next_random() ^ next_random() << 40) & mask;
    int64_t period = sizeof pattern;
    for (int64_t at = 0; at < bytes; at += period)
        memcpy(memory + at, pattern, (size_t)(bytes - at < period ? bytes - at : period));
    random_state = kept;
}

static void check_results(const Session *s, const Case *c, int64_t call, int64_t rank, char **given)
{
    const RankCase *own = &c->ranks[rank];
    char *expected[MOST_GIVEN] = {NULL};
    for (int64_t i = 0; i < own->num_given; i++) {
        expected[i] = malloc((size_t)own->given_bytes[i] + 1);
        fill(expected[i], own->given_bytes[i], c->kind, s->seed, call, rank, i);
    }
    const int64_t *row = c->results;
    for (int64_t n = 0; n < c->num_results; n++, row += row[0]) {
        if (row[1] != rank)
            continue;
        int64_t width = ELEMENT_BYTES[c->kind], count = row[4], num_parts = row[5], num_steps = row[6];
        const int64_t *parts = row + 7, *steps = parts + 3 * num_parts;
        char *registers[MOST_RANKS * MOST_GIVEN] = {NULL};
        int64_t num_registers = num_parts;
        for (int64_t i = 0; i < num_parts; i++) {
            int64_t holder = parts[3 * i], number = parts[3 * i + 1], offset = parts[3 * i + 2];
            int64_t bytes = c->ranks[holder].given_bytes[number];
            char *whole = malloc((size_t)bytes + 1);
            fill(whole, bytes, c->kind, s->seed, call, holder, number);
            registers[i] = malloc((size_t)(count * width) + 1);
            memcpy(registers[i], whole + offset, (size_t)(count * width));
            free(whole);
        }
        const char *total = registers[0];
        for (int64_t i = 0; i < num_steps; i++) {
            int64_t target = steps[3 * i + 2] < 0 ? num_registers : steps[3 * i + 2];
            for (; num_registers <= target; num_registers++)
                registers[num_registers] = malloc((size_t)(count * width) + 1);
            additions()[c->kind](registers[target], registers[steps[3 * i]], registers[steps[3 * i + 1]], count);
            total = registers[target];
        }
        memcpy(expected[row[2]] + row[3], total, (size_t)(count * width));
        for (int64_t i = 0; i < num_registers; i++)
            free(registers[i]);
    }
    for (int64_t i = 0; i < own->num_given; i++) {
        if (memcmp(expected[i], given[i], (size_t)own->given_bytes[i]) != 0)
            fail("call %lld: rank %lld has another tensor %lld", call, rank, i);
        free(expected[i]);
    }
}

static uint32_t reached_word(const Exchange *x, int64_t rank)
{
    return atomic_load_explicit((_Atomic uint32_t *)(void *)(x->reached + LINE_BYTES * rank), memory_order_relaxed);
}

/* Run a program until it is done, as phases.py does; -1 once all are to stop. */
static int go(Session *s, Exchange *x, const int64_t *program, const int64_t *table, const char *text, int64_t location)
{
    PreparedCall run = {.exchange = x, .program = program, .table = table, .text = text, .length = (int64_t)strlen(text),
                        .location = location};
    x->may_spin = below(2) == 0;
    for (;;) {
        is_disturbed = 1;
        int code = lockstep_run(&run);
        is_disturbed = 0;
        if (code != WAITING)
            return code;
        atomic_fetch_add_explicit(&total_sleeps, 1, memory_order_relaxed);
        int stops = atomic_load_explicit(&s->stop, memory_order_seq_cst);
        if (stops || (s->may_withdraw && below(3) == 0)) {
            is_disturbed = 1;
            int withdrawn = lockstep_withdraw(x);
            is_disturbed = 0;
            if (stops)
                return -1;
            if (!withdrawn)
                continue;
            atomic_fetch_add_explicit(&total_withdrawn, 1, memory_order_relaxed);
            struct timespec pause = {0, (long)below(300000)};
            nanosleep(&pause, NULL);
            for (int64_t rank = 0; rank < s->size; rank++) /* none has come to the phase after the one it has left */
                if ((int32_t)(reached_word(x, rank) - (x->arrivals + (uint32_t)s->size)) > 0)
                    fail("rank %lld goes on though rank %lld has withdrawn", rank, x->rank, 0);
        }
    }
}

static void check_pages(const Exchange *x, const char *const *texts)
{
    for (int64_t rank = 0; rank < x->size; rank++) {
        const char *page = x->pages + (2 * rank + 1 - x->parity) * x->page_bytes;
        int32_t length;
        memcpy(&length, page + 8, sizeof length);
        if (length != (int32_t)strlen(texts[rank]) || memcmp(page + TEXT, texts[rank], (size_t)length) != 0)
            fail("rank %lld reads another text of rank %lld", x->rank, rank, 0);
    }
}

/* Let the ranks of `mask` call something else; every rank must say so, and find what each has called, and its line. */
static int make_different_call(Session *s, Exchange *x, const Case *c, int64_t call, uint64_t mask)
{
    int64_t table[MOST_GIVEN];
    for (int i = 0; i < MOST_GIVEN; i++)
        table[i] = (int64_t)(intptr_t)s->heap[x->rank];
    char texts[MOST_RANKS][64], lines[MOST_RANKS][64];
    const char *text_of[MOST_RANKS], *line_of[MOST_RANKS];
    for (int64_t rank = 0; rank < s->size; rank++) {
        const char *end = (mask >> rank & 1) == 0 ? "," : call % 2 ? "." : " differs"; /* in one byte, or in length */
        snprintf(texts[rank], sizeof texts[rank], "call %lld%s", (long long)call, end);
        snprintf(lines[rank], sizeof lines[rank], "line %lld of rank %lld", (long long)call, (long long)rank);
        text_of[rank] = texts[rank];
        line_of[rank] = lines[rank];
    }
    int code = go(s, x, c->ranks[x->rank].programs[FROM_OUTSIDE], table, texts[x->rank], NOWHERE);
    if (code < 0)
        return code;
    if (code != DIFFERENT)
        fail("call %lld differs, and rank %lld is told %lld", call, x->rank, code);
    check_pages(x, text_of);
    static const int64_t barrier[] = {CALL, END};
    code = go(s, x, barrier, table, lines[x->rank], NOWHERE);
    if (code >= 0)
        check_pages(x, line_of);
    if (x->rank == 0)
        atomic_fetch_add_explicit(&total_different, 1, memory_order_relaxed);
    return code;
}

static int make_call(Session *s, Exchange *x, const Case *c, int64_t call, uint64_t in_group)
{
    const RankCase *own = &c->ranks[x->rank];
    char *given[MOST_GIVEN], text[64];
    int64_t table[MOST_GIVEN + MOST_RANKS], location = NOWHERE;
    for (int64_t i = 0; i < own->num_given; i++) {
        int64_t shift = below(2) ? (int64_t)below(16) : 0;
        given[i] = own->programs[IN_PLACE] ? s->heap[x->rank] : malloc((size_t)(shift + own->given_bytes[i]) + 1);
        char *tensor = own->programs[IN_PLACE] ? given[i] : given[i] + shift;
        fill(tensor, own->given_bytes[i], c->kind, s->seed, call, x->rank, i);
        table[i] = (int64_t)(intptr_t)tensor;
    }
    x->scratch = malloc((size_t)own->num_scratch * BLOCK_BYTES + 1);
    snprintf(text, sizeof text, "call %lld", (long long)call);
    /* As in an all-reduce of one tensor, which is the result and the part. */
    int may_lie = own->programs[IN_PLACE] != NULL;
    int lies = may_lie && (in_group >> x->rank & 1);
    if (may_lie)
        table[1] = table[0];
    if (lies)
        location = x->rank * 1000 + call;
    int code = go(s, x, own->programs[lies ? FROM_GROUP : FROM_OUTSIDE], table, text, location);
    if (code == HAS_PLACES) {
        int everyone = 1;
        for (int64_t rank = 0; rank < s->size; rank++) {
            int64_t found, expected = in_group >> rank & 1 ? rank * 1000 + call : NOWHERE;
            memcpy(&found, x->pages + (2 * rank + 1 - x->parity) * x->page_bytes, sizeof found);
            if (found != expected)
                fail("rank %lld reads location %lld of rank %lld", x->rank, found, rank);
            everyone &= found != NOWHERE;
        }
        if (everyone) {
            int64_t places[MOST_RANKS];
            for (int64_t rank = 0; rank < s->size; rank++)
                places[rank] = (int64_t)(intptr_t)s->heap[rank];
            code = go(s, x, own->programs[IN_PLACE], places, text, NOWHERE);
        } else
            code = go(s, x, own->programs[AFTER_CALL], table, text, NOWHERE);
    }
    char *found[MOST_GIVEN];
    for (int64_t i = 0; i < own->num_given; i++)
        found[i] = (char *)(intptr_t)table[i];
    if (code > 0)
        fail("call %lld ends on rank %lld with code %lld", call, x->rank, code);
    if (code == 0)
        check_results(s, c, call, x->rank, found);
    for (int64_t i = 0; i < own->num_given; i++)
        if (!may_lie)
            free(given[i]);
    free(x->scratch);
    if (code == 0 && x->rank == 0)
        atomic_fetch_add_explicit(&total_calls, 1, memory_order_relaxed);
    return code;
}

static const Case *choose_case(int64_t size, int64_t buffer_bytes, uint64_t number)
{
    for (;; number++) {
        const Case *found = &cases[number % (uint64_t)num_cases];
        if (found->size == size && (buffer_bytes == 0 || found->buffer_bytes == buffer_bytes))
            return found;
    }
}

static void *run_rank(void *argument)
{
    Member *member = argument;
    Session *s = member->session;
    int64_t lines = (s->size + 1) * LINE_BYTES, pages = lines + 2 * s->size * PAGE_BYTES;
    Exchange x = {.counter = (Counter *)(void *)s->memory,
                  .reached = s->memory + LINE_BYTES,
                  .pages = s->memory + lines,
                  .buffers = s->memory + pages,
                  .stop = &s->stop,
                  .page_bytes = PAGE_BYTES,
                  .buffer_bytes = s->buffer_bytes,
                  .size = s->size,
                  .rank = member->rank,
                  .spin_ns = 5000,
                  .has_core = (uint32_t)(s->seed >> 3 & 1),
                  .arrivals = s->begin};
    for (int64_t call = 0; call < s->num_calls; call++) {
        seed_random(s->seed, 77, (uint64_t)call, 0); /* the same on all ranks */
        const Case *c = choose_case(s->size, s->buffer_bytes, next_random());
        uint64_t in_group = below(3) ? next_random() : ~(uint64_t)0, all = ((uint64_t)1 << s->size) - 1;
        uint64_t mask = next_random() & all;
        int differs = c->compares && s->may_differ && below(4) == 0 && mask != 0 && mask != all;
        seed_random(s->seed, 78, (uint64_t)call, (uint64_t)x.rank);
        int code = differs ? make_different_call(s, &x, c, call, mask) : make_call(s, &x, c, call, in_group);
        if (code < 0)
            break;
    }
    return NULL;
}

static void run_session(uint64_t seed)
{
    Session s = {.seed = seed};
    current = &s;
    seed_random(seed, 1, 2, 3);
    s.size = 2 + (int64_t)below(MOST_RANKS - 1);
    s.num_calls = 20;
    s.may_withdraw = below(3) == 0;
    s.may_differ = below(2) == 0;
    s.will_stop = below(6) == 0;
    waits_are_endless = !s.may_withdraw && !s.will_stop && below(4) != 0;
    s.begin = below(2) ? (uint32_t)0 - (uint32_t)below(200) : below(2) ? 0x80000000u - (uint32_t)below(200) : 0;
    s.buffer_bytes = choose_case(s.size, 0, next_random())->buffer_bytes;
    s.memory = calloc(1, (size_t)((s.size + 1) * LINE_BYTES + 2 * s.size * (PAGE_BYTES + s.buffer_bytes)));
    for (int64_t rank = 0; rank < s.size; rank++)
        s.heap[rank] = calloc(1, MOST_BYTES);
    atomic_store((_Atomic uint32_t *)(void *)s.memory, s.begin);
    for (int64_t rank = 0; rank < s.size; rank++)
        atomic_store((_Atomic uint32_t *)(void *)(s.memory + LINE_BYTES * (1 + rank)), s.begin);
    pthread_t threads[MOST_RANKS];
    Member members[MOST_RANKS];
    for (int64_t rank = 0; rank < s.size; rank++) {
        members[rank] = (Member){&s, rank};
        if (pthread_create(&threads[rank], NULL, run_rank, &members[rank]) != 0)
            exit(2);
    }
    if (s.will_stop) {
        struct timespec pause = {0, (long)below(20000000)};
        nanosleep(&pause, NULL);
        atomic_store_explicit(&s.stop, 1, memory_order_seq_cst);
        lockstep_wake((Counter *)(void *)s.memory);
        atomic_fetch_add_explicit(&total_stopped, 1, memory_order_relaxed);
    }
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += HANG_SECONDS;
    for (int64_t rank = 0; rank < s.size; rank++)
        if (pthread_timedjoin_np(threads[rank], NULL, &limit) != 0)
            fail("rank %lld hangs; waits are endless: %lld", rank, waits_are_endless, 0);
    Counter *counter = (Counter *)(void *)s.memory;
    if (atomic_load_explicit(&counter->sleepers, memory_order_relaxed) != 0)
        fail("%lld sleepers are left", atomic_load_explicit(&counter->sleepers, memory_order_relaxed), 0, 0);
    for (int64_t rank = 0; rank < s.size; rank++)
        free(s.heap[rank]);
    free(s.memory);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    read_cases(argv[1]);
    uint64_t seed = strtoull(argv[2], NULL, 10) * 1000000, first = seed;
    int64_t end = nanoseconds() + strtoll(argv[3], NULL, 10) * 1000000000;
    while (nanoseconds() < end)
        run_session(seed++);
    printf("right: %llu sessions, %lld calls, %lld different ones, %lld returns to wait, %lld withdrawn, %lld stops\n",
           (unsigned long long)(seed - first), (long long)total_calls, (long long)total_different,
           (long long)total_sleeps, (long long)total_withdrawn, (long long)total_stopped);
    return 0;
}
