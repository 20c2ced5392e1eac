#define _GNU_SOURCE
#include "load.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "mock.h"

#define MAX_BODIES 1024
#define MAX_HEAD_BYTES 16384
/* Of each kind, in one run: at 100,000 a second, 80 seconds. */
#define MAX_TIMINGS 8000000

/* A lockstep stream that stands still this long gets its next chunk anyway: the proxy holds one back. */
#define STALL_NS (100 * NS_PER_MS)
/* Requests under way at the end of a run may be answered for this long. The rest is reported as unanswered. */
#define DRAIN_NS (2 * NS_PER_S)
/* A client whose request failed waits this long, so that a dead proxy is not stormed. */
#define RECONNECT_NS (10 * NS_PER_MS)
/* A request of a burst that takes longer is counted. */
#define SLOW_NS (250 * NS_PER_MS)
/* From the last answer of a burst to the next burst. */
#define BURST_PAUSE_NS (100 * NS_PER_MS)
/* Idle streams that are not open this long after the end of warming are reported as errors. */
#define OPEN_NS (10 * NS_PER_S)
#define OPEN_POLL_NS (10 * NS_PER_MS)
/* Failures whose detail goes to stderr, in one run. */
#define MAX_FAILURES_SHOWN 5

static enum { IDLE, WARMING, MEASURING, DRAINING } phase;
static struct plan plan;

/* What the run has seen: from its first connection to its last, or (measured_...) while measuring. */
static struct {
    int64_t measure_ns; /* when measuring begins */
    int64_t end_ns;     /* of measuring, then of draining */
    int64_t stalls_checked_ns;
    int64_t n_errors;
    int64_t n_stalls;
    int64_t n_slow;
    int64_t spun_ns;
    int n_bursts_left;
    int64_t next_burst_ns; /* 0: the last one is under way */
    int64_t measured_requests;
    int64_t measured_chunks;
    double measured_s;
    double proxy_cpu_s; /* when measuring began, then while measuring */
    double load_cpu_s;
} run;

/* ---- measuring ------------------------------------------------------------------------------------- */

/* In units of 100 ns: up to 429 s. */
struct timings {
    uint32_t *values;
    size_t n;
};
#define TIMING_NS 100

static struct timings answer_times; /* unary: the whole answer; streams: the first chunk */
static struct timings chunk_times;  /* one way, from the mock's send to the client's read */

static void timings_add(struct timings *timings, int64_t ns) {
    if (phase == MEASURING && timings->n < MAX_TIMINGS)
        timings->values[timings->n++] = (uint32_t)(ns / TIMING_NS);
}

static int compare_timings(const void *a, const void *b) {
    uint32_t left = *(const uint32_t *)a;
    uint32_t right = *(const uint32_t *)b;
    return (left > right) - (left < right);
}

static double quantile_us(const struct timings *timings, double quantile) {
    size_t index = (size_t)(quantile * (double)timings->n);
    if (index >= timings->n)
        index = timings->n - 1;
    return timings->values[index] * (double)TIMING_NS / NS_PER_US;
}

static void print_timings(const char *name, struct timings *timings) {
    if (timings->n == 0) {
        printf("\"%s\":null,", name);
        return;
    }
    qsort(timings->values, timings->n, sizeof *timings->values, compare_timings);
    printf("\"%s\":{\"n\":%zu,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f},", name,
           timings->n, quantile_us(timings, 0.5), quantile_us(timings, 0.9), quantile_us(timings, 0.99),
           quantile_us(timings, 1));
}

/* A process's CPU clock: user and system time of all its threads, those that have ended too, in ns, where
 * /proc/PID/stat counts in steps of 10 ms. */
static double proxy_cpu_s(void) {
    double total_s = 0;
    for (int i = 0; i < plan.n_pids; i++) {
        clockid_t clock;
        struct timespec used;
        if (clock_getcpuclockid(plan.pids[i], &clock) == 0 && clock_gettime(clock, &used) == 0)
            total_s += (double)used.tv_sec + (double)used.tv_nsec / NS_PER_S;
    }
    return total_s;
}

/* Without what went into polling in vain. */
static double load_cpu_s(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + (double)(used.tv_nsec - run.spun_ns) / NS_PER_S;
}

void load_spun(int64_t ns) {
    run.spun_ns += ns;
}

static void start_measuring(int64_t now) {
    phase = MEASURING;
    run.end_ns += now - run.measure_ns;
    run.measure_ns = now;
    run.proxy_cpu_s = proxy_cpu_s();
    run.load_cpu_s = load_cpu_s();
}

/* ---- load: closed-loop clients --------------------------------------------------------------------- */

enum progress { HEAD, FIXED_LENGTH, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, UNTIL_CLOSE, COMPLETE };

struct client {
    struct connection connection; /* fd -1: not connected */
    struct timer reconnect;
    int id;
    enum progress progress;
    bool close_after; /* the proxy said so */
    int status;
    char head[MAX_HEAD_BYTES];
    size_t n_head;
    uint64_t remaining; /* of a fixed length or a chunk */
    size_t n_line;      /* of the trailer's current line */
    bool in_extension;  /* of a chunk size */
    uint64_t n_body;
    struct buffer events; /* the part of a stream that does not end with an event's blank line */
    int n_events;
    bool done_seen;
    int64_t started_ns;
    int64_t heard_ns;
};

static struct client *clients[MAX_CLIENTS];
static struct buffer bodies[MAX_BODIES];
static int n_bodies;
static unsigned next_body;
static int n_connected;
static int n_failures_shown;

static void client_disconnect(struct client *client) {
    timer_disarm(&client->reconnect);
    if (client->connection.fd < 0)
        return;
    close(client->connection.fd);
    client->connection.fd = -1;
    n_connected--;
    client->connection.wants_write = false;
    buffer_clear(&client->connection.out);
}

static void client_expect_answer(struct client *client) {
    client->progress = HEAD;
    client->close_after = false;
    client->status = 0;
    client->n_head = 0;
    client->n_body = 0;
    client->n_events = 0;
    client->done_seen = false;
    buffer_clear(&client->events);
    client->started_ns = now_ns();
    client->heard_ns = client->started_ns;
}

static void client_send_request(struct client *client) {
    const struct buffer *body = &bodies[next_body++ % (unsigned)n_bodies];
    size_t n_shared = buffer_length(body) - 1; /* without the closing brace */
    char fields[128];
    char head[512];
    int n_fields;
    int n_head;
    if (plan.stream) {
        int64_t pace = plan.interval_us < 0 ? 0 : 1 + plan.interval_us / SEED_INTERVAL_US;
        n_fields = snprintf(fields, sizeof fields, ",\"stream\":true,\"max_tokens\":%d,\"seed\":%" PRId64 "}",
                            plan.n_chunks, SEED_BASE + client->id + pace * SEED_CLIENTS);
    } else {
        n_fields = snprintf(fields, sizeof fields, ",\"stream\":false,\"max_tokens\":48}");
    }
    n_head = snprintf(head, sizeof head,
                      "POST /v1/chat/completions HTTP/1.1\r\n"
                      "Host: 127.0.0.1:%d\r\n"
                      "User-Agent: OpenAI/Python 1.99.0\r\n"
                      "Accept: application/json\r\n"
                      "Content-Type: application/json\r\n"
                      "Authorization: Bearer sk-test-1234567890\r\n"
                      "Content-Length: %zu\r\n"
                      "\r\n",
                      plan.port, n_shared + (size_t)n_fields);
    static struct buffer request;
    buffer_clear(&request);
    buffer_append(&request, head, (size_t)n_head);
    buffer_append(&request, body->data, n_shared);
    buffer_append(&request, fields, (size_t)n_fields);

    client_expect_answer(client);
    write_bytes(&client->connection, request.data, buffer_length(&request));
}

static void client_failed(struct client *client, const char *why) {
    run.n_errors++;
    if (n_failures_shown < MAX_FAILURES_SHOWN) {
        n_failures_shown++;
        fprintf(stderr,
                "port %d, client %d: %s; status %d, %zu bytes of head, %" PRIu64
                " of body, %d events\n%.*s\n",
                plan.port, client->id, why, client->status, client->n_head, client->n_body, client->n_events,
                (int)client->n_head, client->head);
    }
    client_disconnect(client);
    if (phase != DRAINING && plan.n_bursts == 0)
        timer_arm(&client->reconnect, now_ns() + RECONNECT_NS);
}

/* Does not wait: the request is kept until the connection stands. */
static void client_connect(void *owner) {
    struct client *client = owner;
    struct sockaddr_in address = loopback(plan.port);
    client->connection.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (client->connection.fd < 0)
        die("socket");
    n_connected++;
    client->connection.write_error = 0;
    set_no_delay(client->connection.fd);
    watch(&client->connection, EPOLL_CTL_ADD);
    if (connect(client->connection.fd, (struct sockaddr *)&address, sizeof address) < 0 &&
        errno != EINPROGRESS) {
        client_expect_answer(client);
        client_failed(client, strerror(errno));
        return;
    }
    client_send_request(client);
}

static void client_answered(struct client *client) {
    if (client->status != 200) {
        client_failed(client, "not 200");
        return;
    }
    if (plan.stream && (!client->done_seen || client->n_events != plan.n_chunks)) {
        client_failed(client, "stream ended early");
        return;
    }
    if (client->n_body == 0) {
        client_failed(client, "empty answer");
        return;
    }
    if (phase == MEASURING)
        run.measured_requests++;
    if (phase == MEASURING && client->heard_ns - client->started_ns > SLOW_NS)
        run.n_slow++;
    if (!plan.stream)
        timings_add(&answer_times, client->heard_ns - client->started_ns);
    if (phase == DRAINING || plan.n_bursts > 0) {
        client_disconnect(client);
    } else if (client->close_after) {
        client_disconnect(client);
        client_connect(client);
    } else {
        client_send_request(client);
    }
}

static void client_take_event(struct client *client, const char *event, size_t n) {
    const char *data = memmem(event, n, "data:", 5);
    if (data == NULL)
        return; /* a comment, such as a heartbeat */
    if (memmem(event, n, "[DONE]", 6) != NULL) {
        client->done_seen = true;
        return;
    }
    client->n_events++;
    if (phase == MEASURING)
        run.measured_chunks++;
    if (client->n_events == 1)
        timings_add(&answer_times, client->heard_ns - client->started_ns);
    const char *timestamp = memmem(event, n, "\"t=", 3);
    if (timestamp != NULL)
        timings_add(&chunk_times, client->heard_ns - strtoll(timestamp + 3, NULL, 10));
}

static void client_take_body(struct client *client, const char *data, size_t n) {
    struct buffer *events = &client->events;
    client->n_body += n;
    if (!plan.stream)
        return;
    buffer_append(events, data, n);
    for (;;) {
        char *start = events->data + events->start;
        char *end = memmem(start, buffer_length(events), "\n\n", 2);
        if (end == NULL)
            break;
        client_take_event(client, start, (size_t)(end - start));
        buffer_consume(events, (size_t)(end - start) + 2);
        if (buffer_length(events) == 0)
            break;
    }
}

/* Takes the head's bytes off `data`; returns how many they were, 0 when the head is too long. */
static size_t client_take_head(struct client *client, const char *data, size_t n) {
    size_t before = client->n_head;
    size_t room = MAX_HEAD_BYTES - 1 - before;
    size_t taken = n < room ? n : room;
    memcpy(client->head + before, data, taken);
    client->n_head += taken;
    client->head[client->n_head] = '\0';
    size_t n_head = head_length(client->head, client->n_head);
    if (n_head == 0)
        return taken;
    client->n_head = n_head;
    client->head[n_head] = '\0';
    client->status = atoi(client->head + strlen("HTTP/1.1 "));
    const char *connection = header_value(client->head, n_head, "connection:");
    client->close_after = connection != NULL && strncasecmp(connection, "close", 5) == 0;
    const char *length = header_value(client->head, n_head, "content-length:");
    if (header_value(client->head, n_head, "transfer-encoding:") != NULL) {
        client->progress = CHUNK_SIZE;
        client->remaining = 0;
        client->in_extension = false;
    } else if (length != NULL) {
        client->remaining = strtoull(length, NULL, 10);
        client->progress = client->remaining > 0 ? FIXED_LENGTH : COMPLETE;
    } else {
        client->progress = UNTIL_CLOSE;
    }
    return n_head - before;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* One byte of a chunked body's framing. */
static void client_take_framing(struct client *client, char c) {
    int digit = hex_digit(c);
    switch (client->progress) {
    case CHUNK_SIZE:
        if (c == '\n') {
            client->progress = client->remaining > 0 ? CHUNK_DATA : TRAILER;
            client->in_extension = false;
            client->n_line = 0;
        } else if (digit >= 0 && !client->in_extension) {
            client->remaining = client->remaining * 16 + (uint64_t)digit;
        } else {
            client->in_extension = true;
        }
        break;
    case CHUNK_END:
        if (c == '\n')
            client->progress = CHUNK_SIZE;
        break;
    default: /* TRAILER */
        if (c == '\n') {
            if (client->n_line == 0)
                client->progress = COMPLETE;
            client->n_line = 0;
        } else if (c != '\r') {
            client->n_line++;
        }
        break;
    }
}

static void client_take(struct client *client, const char *data, size_t n) {
    while (n > 0 && client->progress != COMPLETE) {
        size_t taken = 1;
        switch (client->progress) {
        case HEAD:
            taken = client_take_head(client, data, n);
            if (taken == 0) {
                client_failed(client, "head too long");
                return;
            }
            break;
        case UNTIL_CLOSE:
            taken = n;
            client_take_body(client, data, taken);
            break;
        case FIXED_LENGTH:
        case CHUNK_DATA:
            taken = n < client->remaining ? n : client->remaining;
            client_take_body(client, data, taken);
            client->remaining -= taken;
            if (client->remaining == 0)
                client->progress = client->progress == CHUNK_DATA ? CHUNK_END : COMPLETE;
            break;
        default:
            client_take_framing(client, *data);
            break;
        }
        data += taken;
        n -= taken;
    }
    if (n > 0)
        client_failed(client, "bytes after the answer");
    else if (client->progress == COMPLETE)
        client_answered(client);
}

void load_event(struct connection *connection, uint32_t events) {
    struct client *client = (struct client *)connection;
    static char data[READ_BYTES];
    if ((events & EPOLLOUT) != 0)
        flush(&client->connection);
    if ((events & ~(uint32_t)EPOLLOUT) == 0)
        return;
    ssize_t got = recv(client->connection.fd, data, sizeof data, 0);
    if (got < 0) {
        if (errno != EAGAIN)
            client_failed(client, strerror(errno));
        return;
    }
    client->heard_ns = now_ns();
    if (got == 0) {
        if (client->progress == UNTIL_CLOSE) {
            client->close_after = true;
            client_answered(client);
        } else {
            int error = client->connection.write_error;
            client_failed(client, error != 0 ? strerror(error) : "closed early");
        }
        return;
    }
    int n_events_before = client->n_events;
    client_take(client, data, (size_t)got);
    if (plan.interval_us < 0 && client->n_events > n_events_before)
        lockstep_advance(client->id, client->n_events);
}

static void check_stalls(int64_t now) {
    if (now - run.stalls_checked_ns < STALL_NS / 2)
        return;
    run.stalls_checked_ns = now;
    run.n_stalls += lockstep_push(now - STALL_NS);
}

/* No new requests; those under way get their answers. */
static void finish_measuring(int64_t now) {
    run.measured_s = (double)(now - run.measure_ns) / NS_PER_S;
    run.proxy_cpu_s = proxy_cpu_s() - run.proxy_cpu_s;
    run.load_cpu_s = load_cpu_s() - run.load_cpu_s;
    if (run.load_cpu_s < 0) /* what it spun is wall-clock time: some of it was another program's */
        run.load_cpu_s = 0;
    phase = DRAINING;
    /* A burst has had all of its time. */
    run.end_ns = now + (plan.n_bursts > 0 ? 0 : DRAIN_NS);
    for (int id = 0; id < plan.n_clients; id++) {
        timer_disarm(&clients[id]->reconnect);
        if (plan.idle)
            client_disconnect(clients[id]);
    }
}

static int count_open_streams(void) {
    int n = 0;
    for (int id = 0; id < plan.n_clients; id++) {
        if (clients[id]->connection.fd >= 0 && clients[id]->n_events > 0)
            n++;
    }
    return n;
}

/* Measuring begins when warming is over and, of idle streams, all are open. */
static void finish_warming(int64_t now) {
    if (plan.idle) {
        int n_missing = plan.n_clients - count_open_streams();
        if (n_missing > 0 && now < run.measure_ns + OPEN_NS)
            return;
        if (n_missing > 0)
            fprintf(stderr, "port %d: %d of %d streams are not open\n", plan.port, n_missing, plan.n_clients);
        run.n_errors += n_missing;
    }
    start_measuring(now);
}

/* The next burst comes a while after the last answer to the one before. True when all is done. */
static bool bursts_are_over(int64_t now) {
    if (run.next_burst_ns == 0) {
        if (n_connected > 0)
            return false;
        if (run.n_bursts_left == 0)
            return true;
        run.next_burst_ns = now + BURST_PAUSE_NS;
    } else if (now >= run.next_burst_ns) {
        run.next_burst_ns = 0;
        run.n_bursts_left--;
        for (int id = 0; id < plan.n_clients; id++)
            client_connect(clients[id]);
    }
    return false;
}

static void finish_run(int n_unanswered) {
    for (int id = 0; id < plan.n_clients; id++)
        client_disconnect(clients[id]);
    phase = IDLE;
    printf("{\"measured_s\":%.4f,\"requests\":%" PRId64 ",\"chunks\":%" PRId64 ",\"errors\":%" PRId64
           ",\"stalls\":%" PRId64 ",\"slow\":%" PRId64 ",\"unanswered\":%d,",
           run.measured_s, run.measured_requests, run.measured_chunks, run.n_errors, run.n_stalls, run.n_slow,
           n_unanswered);
    print_timings("answer_us", &answer_times);
    print_timings("chunk_us", &chunk_times);
    if (plan.n_pids > 0)
        printf("\"proxy_cpu_s\":%.6f,", run.proxy_cpu_s);
    else
        printf("\"proxy_cpu_s\":null,");
    printf("\"load_cpu_s\":%.6f}\n", run.load_cpu_s);
    fflush(stdout);
}

void load_bodies(const char *path) {
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n;
    if (file == NULL)
        die(path);
    n_bodies = 0;
    while (n_bodies < MAX_BODIES && (n = getline(&line, &capacity, file)) > 0) {
        if (line[n - 1] == '\n')
            n--;
        if (n == 0 || line[n - 1] != '}') {
            fprintf(stderr, "%s: line %d is not a JSON object\n", path, n_bodies + 1);
            exit(1);
        }
        buffer_clear(&bodies[n_bodies]);
        buffer_append(&bodies[n_bodies], line, (size_t)n);
        n_bodies++;
    }
    free(line);
    fclose(file);
    if (n_bodies == 0) {
        fprintf(stderr, "%s: empty\n", path);
        exit(1);
    }
}

int load_n_bodies(void) {
    return n_bodies;
}

static struct client *new_client(int id) {
    struct client *client = calloc(1, sizeof *client);
    if (client == NULL)
        die("calloc");
    client->connection.kind = CLIENT;
    client->connection.fd = -1;
    client->reconnect.fire = client_connect;
    client->reconnect.owner = client;
    client->id = id;
    return client;
}

void load_start(const struct plan *new_plan) {
    if (answer_times.values == NULL) {
        answer_times.values = malloc(MAX_TIMINGS * sizeof *answer_times.values);
        chunk_times.values = malloc(MAX_TIMINGS * sizeof *chunk_times.values);
        if (answer_times.values == NULL || chunk_times.values == NULL)
            die("malloc");
    }
    plan = *new_plan;
    memset(&run, 0, sizeof run);
    answer_times.n = 0;
    chunk_times.n = 0;
    next_body = 0;
    n_failures_shown = 0;
    lockstep_forget();
    phase = WARMING;
    run.measure_ns = now_ns() + (int64_t)(plan.warm_s * NS_PER_S);
    run.end_ns = run.measure_ns + (int64_t)(plan.run_s * NS_PER_S);
    run.n_bursts_left = plan.n_bursts;
    run.next_burst_ns = run.measure_ns;
    for (int id = 0; id < plan.n_clients; id++) {
        if (clients[id] == NULL)
            clients[id] = new_client(id);
        /* Streams that were opened at once would all have their chunks at once. */
        if (plan.idle)
            timer_arm(&clients[id]->reconnect, now_ns() + plan.interval_us * NS_PER_US * id / plan.n_clients);
        else if (plan.n_bursts == 0)
            client_connect(clients[id]);
    }
}

bool load_is_idle(void) {
    return phase == IDLE;
}

void load_tick(int64_t now) {
    if (phase == WARMING && now >= run.measure_ns)
        finish_warming(now);
    else if (phase == MEASURING && plan.n_bursts > 0 && bursts_are_over(now))
        finish_measuring(now);
    else if (phase == MEASURING && now >= run.end_ns)
        finish_measuring(now);
    if (phase == DRAINING && (n_connected == 0 || now >= run.end_ns))
        finish_run(n_connected);
    if (phase != IDLE && plan.interval_us < 0)
        check_stalls(now);
}

int64_t load_wake_ns(int64_t now) {
    int64_t wake_ns = now + NS_PER_S;
    if (phase == WARMING && run.measure_ns < wake_ns)
        wake_ns = run.measure_ns > now ? run.measure_ns : now + OPEN_POLL_NS;
    if (phase == MEASURING && plan.n_bursts > 0) {
        int64_t burst_ns = run.next_burst_ns != 0 ? run.next_burst_ns : now + BURST_PAUSE_NS;
        if (burst_ns < wake_ns)
            wake_ns = burst_ns;
    }
    if ((phase == MEASURING || phase == DRAINING) && run.end_ns < wake_ns)
        wake_ns = run.end_ns;
    if (phase != IDLE && plan.interval_us < 0 && now + STALL_NS / 2 < wake_ns)
        wake_ns = now + STALL_NS / 2;
    return wake_ns;
}
