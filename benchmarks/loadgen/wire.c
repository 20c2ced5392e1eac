#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

int epoll_fd;

#define MAX_TIMERS_FIRED 256

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * NS_PER_S + now.tv_nsec;
}

void die(const char *what) {
    perror(what);
    exit(1);
}

bool starts_with(const char *text, const char *prefix) {
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

size_t buffer_length(const struct buffer *buffer) {
    return buffer->end - buffer->start;
}

void buffer_reserve(struct buffer *buffer, size_t n) {
    if (buffer->capacity - buffer->end >= n)
        return;
    if (buffer->start > 0) {
        memmove(buffer->data, buffer->data + buffer->start, buffer_length(buffer));
        buffer->end -= buffer->start;
        buffer->start = 0;
    }
    if (buffer->capacity - buffer->end < n) {
        buffer->capacity = (buffer->end + n) * 2;
        buffer->data = realloc(buffer->data, buffer->capacity);
        if (buffer->data == NULL)
            die("realloc");
    }
}

void buffer_append(struct buffer *buffer, const void *bytes, size_t n) {
    buffer_reserve(buffer, n);
    memcpy(buffer->data + buffer->end, bytes, n);
    buffer->end += n;
}

void buffer_clear(struct buffer *buffer) {
    buffer->start = 0;
    buffer->end = 0;
}

void buffer_consume(struct buffer *buffer, size_t n) {
    buffer->start += n;
    if (buffer->start == buffer->end)
        buffer_clear(buffer);
}

static struct timer *first_timer;
static struct timer *last_timer;

void timer_disarm(struct timer *timer) {
    if (!timer->armed)
        return;
    if (timer->previous != NULL)
        timer->previous->next = timer->next;
    else
        first_timer = timer->next;
    if (timer->next != NULL)
        timer->next->previous = timer->previous;
    else
        last_timer = timer->previous;
    timer->armed = false;
}

/* The list is sorted. Searched from its end: all streams of a run have the same interval, so the place is
 * found at once. */
void timer_arm(struct timer *timer, int64_t due_ns) {
    struct timer *before;
    timer_disarm(timer);
    timer->due_ns = due_ns;
    for (before = last_timer; before != NULL && before->due_ns > due_ns; before = before->previous)
        continue;
    timer->previous = before;
    timer->next = before != NULL ? before->next : first_timer;
    if (timer->previous != NULL)
        timer->previous->next = timer;
    else
        first_timer = timer;
    if (timer->next != NULL)
        timer->next->previous = timer;
    else
        last_timer = timer;
    timer->armed = true;
}

int64_t next_timer_ns(int64_t latest_ns) {
    return first_timer != NULL && first_timer->due_ns < latest_ns ? first_timer->due_ns : latest_ns;
}

int fire_due_timers(int64_t now) {
    int n = 0;
    for (; n < MAX_TIMERS_FIRED && first_timer != NULL && first_timer->due_ns <= now; n++) {
        struct timer *timer = first_timer;
        timer_disarm(timer);
        timer->fire(timer->owner);
    }
    return n;
}

void watch(struct connection *connection, int operation) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    if (connection->wants_write)
        event.events |= EPOLLOUT;
    if (epoll_ctl(epoll_fd, operation, connection->fd, &event) < 0)
        die("epoll_ctl");
}

static void want_write(struct connection *connection, bool wanted) {
    if (connection->wants_write == wanted)
        return;
    connection->wants_write = wanted;
    watch(connection, EPOLL_CTL_MOD);
}

bool flush(struct connection *connection) {
    struct buffer *out = &connection->out;
    if (buffer_length(out) > 0) {
        ssize_t sent = send(connection->fd, out->data + out->start, buffer_length(out), MSG_NOSIGNAL);
        if (sent > 0)
            buffer_consume(out, (size_t)sent);
    }
    want_write(connection, buffer_length(out) > 0);
    return buffer_length(out) == 0;
}

void write_bytes(struct connection *connection, const char *bytes, size_t n) {
    if (buffer_length(&connection->out) == 0) {
        ssize_t sent = send(connection->fd, bytes, n, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) {
            connection->write_error = errno;
            return;
        }
        if (sent > 0) {
            bytes += sent;
            n -= (size_t)sent;
        }
    }
    if (n > 0) {
        buffer_append(&connection->out, bytes, n);
        want_write(connection, true);
    }
}

void set_no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

struct sockaddr_in loopback(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

/* ---- HTTP and JSON, as far as needed --------------------------------------------------------------- */

size_t head_length(const char *data, size_t n) {
    const char *end = memmem(data, n, "\r\n\r\n", 4);
    return end != NULL ? (size_t)(end - data) + 4 : 0;
}

const char *header_value(const char *head, size_t n, const char *name) {
    size_t name_length = strlen(name);
    const char *end = head + n;
    const char *line = memchr(head, '\n', n);
    while (line != NULL && (size_t)(end - line) > name_length) {
        line++;
        if (strncasecmp(line, name, name_length) == 0) {
            line += name_length;
            while (*line == ' ')
                line++;
            return line;
        }
        line = memchr(line, '\n', (size_t)(end - line));
    }
    return NULL;
}

/* Our fields are written last, so the end is searched first; a proxy that writes the body anew may have moved
 * them. */
const char *field_value(const char *body, size_t n, const char *quoted_name) {
    size_t name_length = strlen(quoted_name);
    size_t tail = n < 256 ? n : 256;
    const char *value = memmem(body + n - tail, tail, quoted_name, name_length);
    if (value == NULL)
        value = memmem(body, n, quoted_name, name_length);
    if (value == NULL)
        return NULL;
    value += name_length;
    while (*value == ' ' || *value == ':')
        value++;
    return value;
}
