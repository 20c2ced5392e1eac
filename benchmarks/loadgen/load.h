/* The load: clients that each send their next request when the last is answered, that come all at once, or
 * that listen to a slow stream. */
#ifndef LOAD_H
#define LOAD_H

#include <sys/types.h>

#include "wire.h"

#define MAX_PIDS 64

struct plan {
    int port;
    int n_clients;
    bool stream;
    bool idle;           /* opened over one interval, measured when all are open, left when that is over */
    int n_bursts;        /* >0: all clients connect and ask at once, this often; the run ends with the last */
    int n_chunks;        /* of each stream */
    int64_t interval_us; /* between chunks: >0 paced, 0 back to back, -1 lockstep */
    double warm_s;
    double run_s;
    int n_pids; /* the proxy's processes, whose CPU time is taken */
    pid_t pids[MAX_PIDS];
};

/* One JSON object a line. Replaces those loaded before. */
void load_bodies(const char *path);
int load_n_bodies(void);
/* Begins a run; load_tick prints its result when it has ended. */
void load_start(const struct plan *plan);
bool load_is_idle(void);
void load_event(struct connection *connection, uint32_t events);
void load_tick(int64_t now);
/* The load generator polled in vain for this long, in place of sleeping. */
void load_spun(int64_t ns);
/* Until when may be slept, as far as the run goes. */
int64_t load_wake_ns(int64_t now);

#endif
