/*
 * lb: model servers (mock) and load generator in one process. Linux, epoll, one thread.
 *
 * Both ends of the proxy under test live here, which buys three things. They share one core, so the proxy
 * has another to itself. A chunk's way through the proxy is timed one way, with one clock. And streams can
 * run in lockstep: the mock sends chunk k+1 when chunk k has reached the client, so that no proxy looks
 * cheap by forwarding in one write what piled up while it was slow.
 *
 *   lb [--spin] PORT[,PORT...]  mock on these ports of the loopback, commands on stdin, until stdin ends
 *   lb --mock PORT[,PORT...]    mock only, until killed
 *
 * With --spin it never sleeps during a run. The proxy then has no sleeping core to wake, which costs it time in
 * send() and depends on how busy the load generator is: see README.md.
 *
 * It prints {"ready":true} when it listens. A command is one line, its answer one line of JSON:
 *
 *   run port=9001 bodies=FILE mode=unary|stream|idle|burst clients=32 warm_s=0.5 run_s=2
 *       [chunks=100 interval_us=0] [bursts=5] [pids=1,2]
 *
 *   Each of `clients` connections sends its next request when the last is answered. The bodies (FILE: one
 *   JSON object a line) are taken in turn. interval_us: >0 paced, 0 back to back (each chunk its own
 *   write), -1 lockstep. pids: the proxy's processes, whose CPU time is taken over the measured seconds.
 *   idle: paced streams, which are opened over one interval, measured when all are open, and left then.
 *   burst: all clients connect and ask at once, `bursts` times; run_s is what all of it may take.
 *
 * How the mock answers is written in the request body, so it survives any proxy: "stream", "max_tokens" (the
 * number of chunks) and "seed" (client and interval, see SEED_BASE).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include "load.h"
#include "mock.h"

#define MAX_EVENTS 512

static void fail(const char *what, const char *detail) {
    fprintf(stderr, "%s: %s\n", what, detail);
    exit(1);
}

static void take_pids(struct plan *plan, char *list) {
    char *rest = NULL;
    for (char *pid = strtok_r(list, ",", &rest); pid != NULL; pid = strtok_r(NULL, ",", &rest)) {
        if (plan->n_pids == MAX_PIDS)
            fail("too many pids from", pid);
        plan->pids[plan->n_pids++] = atoi(pid);
    }
}

static void take_mode(struct plan *plan, const char *mode) {
    plan->idle = strcmp(mode, "idle") == 0;
    plan->stream = plan->idle || strcmp(mode, "stream") == 0;
    if (strcmp(mode, "burst") == 0)
        plan->n_bursts = 1;
    else if (!plan->stream && strcmp(mode, "unary") != 0)
        fail("unknown mode", mode);
}

static void take_argument(struct plan *plan, const char *name, char *value) {
    if (strcmp(name, "port") == 0)
        plan->port = atoi(value);
    else if (strcmp(name, "bodies") == 0)
        load_bodies(value);
    else if (strcmp(name, "mode") == 0)
        take_mode(plan, value);
    else if (strcmp(name, "clients") == 0)
        plan->n_clients = atoi(value);
    else if (strcmp(name, "warm_s") == 0)
        plan->warm_s = atof(value);
    else if (strcmp(name, "run_s") == 0)
        plan->run_s = atof(value);
    else if (strcmp(name, "bursts") == 0)
        plan->n_bursts = atoi(value);
    else if (strcmp(name, "chunks") == 0)
        plan->n_chunks = atoi(value);
    else if (strcmp(name, "interval_us") == 0)
        plan->interval_us = atoll(value);
    else if (strcmp(name, "pids") == 0)
        take_pids(plan, value);
    else
        fail("unknown argument", name);
}

static void start_run(char *arguments) {
    struct plan plan = {.n_clients = 1, .n_chunks = 100, .warm_s = 0.5, .run_s = 2};
    char *rest = NULL;
    for (char *word = strtok_r(arguments, " ", &rest); word != NULL; word = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(word, '=');
        if (value == NULL)
            fail("not NAME=VALUE", word);
        *value++ = '\0';
        take_argument(&plan, word, value);
    }
    if (load_n_bodies() == 0)
        fail("missing argument", "bodies");
    if (plan.n_clients < 1 || plan.n_clients > MAX_CLIENTS)
        fail("out of range", "clients");
    if (plan.idle && plan.interval_us <= 0)
        fail("out of range", "interval_us");
    load_start(&plan);
}

static void read_commands(void) {
    static char line[4096];
    static size_t n;
    char *end;
    ssize_t got = read(STDIN_FILENO, line + n, sizeof line - 1 - n);
    if (got < 0)
        return;
    if (got == 0)
        exit(0);
    n += (size_t)got;
    line[n] = '\0';
    while ((end = strchr(line, '\n')) != NULL) {
        *end = '\0';
        if (!starts_with(line, "run ") || !load_is_idle())
            fail("cannot do now", line);
        start_run(line + strlen("run "));
        n -= (size_t)(end + 1 - line);
        memmove(line, end + 1, n + 1);
    }
}

static void dispatch(struct connection *connection, uint32_t events) {
    switch (connection->kind) {
    case LISTENER:
        mock_accept(connection);
        break;
    case COMMANDS:
        read_commands();
        break;
    case MOCK:
        mock_event(connection, events);
        break;
    case CLIENT:
        load_event(connection, events);
        break;
    }
}

/* Waits for events until `wake_ns`; spinning, it returns at once. */
static int wait_events(struct epoll_event *events, bool spins, int64_t now, int64_t wake_ns) {
    int64_t wait_ns = wake_ns > now && !spins ? wake_ns - now : 0;
    struct timespec timeout = {.tv_sec = wait_ns / NS_PER_S, .tv_nsec = wait_ns % NS_PER_S};
    return epoll_pwait2(epoll_fd, events, MAX_EVENTS, &timeout, NULL);
}

static void loop(bool may_spin) {
    static struct epoll_event events[MAX_EVENTS];
    int64_t now = now_ns();
    for (;;) {
        bool spins = may_spin && !load_is_idle();
        int64_t began_ns = now;
        int n = wait_events(events, spins, now, next_timer_ns(load_wake_ns(now)));
        for (int i = 0; i < n; i++)
            dispatch(events[i].data.ptr, events[i].events);
        now = now_ns();
        if (spins && n == 0)
            load_spun(now - began_ns);
        if (fire_due_timers(now) > 0)
            now = now_ns();
        load_tick(now);
    }
}

int main(int argc, char **argv) {
    bool mock_only = argc == 3 && strcmp(argv[1], "--mock") == 0;
    bool spin = argc == 3 && strcmp(argv[1], "--spin") == 0;
    if (argc != 2 && !mock_only && !spin) {
        fprintf(stderr, "usage: lb [--mock | --spin] PORT[,PORT...]\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    epoll_fd = epoll_create1(0);
    mock_prepare();
    char *rest = NULL;
    for (char *port = strtok_r(argv[argc - 1], ",", &rest); port != NULL; port = strtok_r(NULL, ",", &rest))
        mock_listen(atoi(port));
    static struct connection commands = {.kind = COMMANDS, .fd = STDIN_FILENO};
    if (!mock_only) {
        fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
        watch(&commands, EPOLL_CTL_ADD);
    }
    printf("{\"ready\":true}\n");
    fflush(stdout);
    loop(spin);
}
