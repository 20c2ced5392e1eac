/* What mock and load generator share: time, byte buffers, timers, connections, and HTTP as far as needed. */
#ifndef WIRE_H
#define WIRE_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NS_PER_S INT64_C(1000000000)
#define NS_PER_MS INT64_C(1000000)
#define NS_PER_US INT64_C(1000)

#define READ_BYTES (256 << 10)
#define MAX_CLIENTS 4096

/* How a client tells the mock, through any proxy, whose stream it asks for and how fast:
 * "seed" = SEED_BASE + client + SEED_CLIENTS * (0 for lockstep, else 1 + interval in units of 100 us). */
#define SEED_BASE 1000000000
#define SEED_CLIENTS 10000
#define SEED_INTERVAL_US 100

/* Of the monotonic clock. */
int64_t now_ns(void);

/* Ends the process with errno's text. */
void die(const char *what);

bool starts_with(const char *text, const char *prefix);

/* ---- byte buffers: live bytes are data[start..end) ------------------------------------------------- */

struct buffer {
    char *data;
    size_t start;
    size_t end;
    size_t capacity;
};

size_t buffer_length(const struct buffer *buffer);
/* Makes room for `n` bytes at `end`. May move `data`. */
void buffer_reserve(struct buffer *buffer, size_t n);
void buffer_append(struct buffer *buffer, const void *bytes, size_t n);
void buffer_clear(struct buffer *buffer);
/* Takes `n` bytes off the front. */
void buffer_consume(struct buffer *buffer, size_t n);

/* ---- timers ---------------------------------------------------------------------------------------- */

struct timer {
    int64_t due_ns;
    struct timer *previous;
    struct timer *next;
    void (*fire)(void *owner);
    void *owner;
    bool armed;
};

void timer_arm(struct timer *timer, int64_t due_ns);
void timer_disarm(struct timer *timer);
/* A bounded number a call, so that sockets are read even when the timers are late. Returns how many. */
int fire_due_timers(int64_t now);
/* When the first timer is due, or `latest_ns` when none is before. */
int64_t next_timer_ns(int64_t latest_ns);

/* ---- connections ----------------------------------------------------------------------------------- */

enum kind { LISTENER, COMMANDS, MOCK, CLIENT };

/* First member of what epoll events point to. A connection is closed by its own event or timer only, so an
 * event still waiting in the same batch never points to freed memory. */
struct connection {
    enum kind kind;
    int fd;
    bool wants_write;
    int write_error; /* errno of a write that failed, which the next read may not see again */
    struct buffer out;
};

extern int epoll_fd;

/* `operation`: EPOLL_CTL_ADD or EPOLL_CTL_MOD. */
void watch(struct connection *connection, int operation);
/* Sends now what the socket takes and keeps the rest for EPOLLOUT. After an error the next read ends. */
void write_bytes(struct connection *connection, const char *bytes, size_t n);
/* Sends what was kept. False while some is left. */
bool flush(struct connection *connection);
void set_no_delay(int fd);
struct sockaddr_in loopback(int port);

/* ---- HTTP and JSON, as far as needed --------------------------------------------------------------- */

/* Bytes of the head with its blank line, 0 while it is not whole. */
size_t head_length(const char *data, size_t n);
/* The value of a header (`name` in lower case, with its colon) in a whole head, or NULL. */
const char *header_value(const char *head, size_t n, const char *name);
/* The value of a field in a JSON body, or NULL. */
const char *field_value(const char *body, size_t n, const char *quoted_name);

#endif
