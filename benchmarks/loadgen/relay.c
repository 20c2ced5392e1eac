/*
 * relay: the floor that no HTTP proxy gets under. Linux, epoll, one thread.
 *
 * Pairs each client connection with one upstream connection, taken in turn, and copies bytes both ways
 * without looking at them.
 *
 *   relay PORT UPSTREAM_PORT[,UPSTREAM_PORT...]     all on the loopback
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_UPSTREAMS 16
#define READ_BYTES (256 << 10)

struct end {
    int fd;
    struct end *peer;
    struct end *next_closed;
    bool closed;
    char *pending; /* bytes the socket did not take yet */
    size_t n_pending;
    size_t capacity;
};

static int epoll_fd;
static struct end *closed_ends; /* freed after the batch: an event in it may still point to one */

static void die(const char *what) {
    perror(what);
    exit(1);
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static void watch(struct end *end, int operation) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = end};
    if (end->n_pending > 0)
        event.events |= EPOLLOUT;
    if (epoll_ctl(epoll_fd, operation, end->fd, &event) < 0)
        die("epoll_ctl");
}

static struct end *new_end(int fd) {
    struct end *end = calloc(1, sizeof *end);
    int on = 1;
    if (end == NULL)
        die("calloc");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    end->fd = fd;
    return end;
}

static void close_end(struct end *end) {
    close(end->fd);
    end->closed = true;
    end->next_closed = closed_ends;
    closed_ends = end;
}

static void free_closed(void) {
    while (closed_ends != NULL) {
        struct end *end = closed_ends;
        closed_ends = end->next_closed;
        free(end->pending);
        free(end);
    }
}

static void accept_pair(int listen_fd, int upstream_port) {
    struct sockaddr_in address = loopback(upstream_port);
    int client_fd = accept(listen_fd, NULL, NULL);
    int upstream_fd = socket(AF_INET, SOCK_STREAM, 0);
    if (client_fd < 0 || connect(upstream_fd, (struct sockaddr *)&address, sizeof address) < 0) {
        close(upstream_fd);
        if (client_fd >= 0)
            close(client_fd);
        return;
    }
    struct end *client = new_end(client_fd);
    struct end *upstream = new_end(upstream_fd);
    client->peer = upstream;
    upstream->peer = client;
    watch(client, EPOLL_CTL_ADD);
    watch(upstream, EPOLL_CTL_ADD);
}

static void keep_pending(struct end *end, const char *bytes, size_t n) {
    if (end->n_pending + n > end->capacity) {
        end->capacity = (end->n_pending + n) * 2;
        end->pending = realloc(end->pending, end->capacity);
        if (end->pending == NULL)
            die("realloc");
    }
    memcpy(end->pending + end->n_pending, bytes, n);
    end->n_pending += n;
    watch(end, EPOLL_CTL_MOD);
}

static void flush(struct end *end) {
    ssize_t sent = send(end->fd, end->pending, end->n_pending, MSG_NOSIGNAL);
    if (sent <= 0)
        return;
    end->n_pending -= (size_t)sent;
    memmove(end->pending, end->pending + sent, end->n_pending);
    if (end->n_pending == 0)
        watch(end, EPOLL_CTL_MOD);
}

static void copy_to_peer(struct end *end) {
    static char data[READ_BYTES];
    ssize_t got = recv(end->fd, data, sizeof data, 0);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        close_end(end);
        close_end(end->peer);
        return;
    }
    ssize_t sent = 0;
    if (end->peer->n_pending == 0)
        sent = send(end->peer->fd, data, (size_t)got, MSG_NOSIGNAL);
    if (sent < 0)
        sent = 0;
    if (sent < got)
        keep_pending(end->peer, data + sent, (size_t)(got - sent));
}

int main(int argc, char **argv) {
    int upstream_ports[MAX_UPSTREAMS];
    int n_upstreams = 0;
    unsigned next_upstream = 0;
    int on = 1;
    if (argc != 3) {
        fprintf(stderr, "usage: relay PORT UPSTREAM_PORT[,UPSTREAM_PORT...]\n");
        return 2;
    }
    for (char *port = strtok(argv[2], ","); port != NULL && n_upstreams < MAX_UPSTREAMS;
         port = strtok(NULL, ","))
        upstream_ports[n_upstreams++] = atoi(port);
    signal(SIGPIPE, SIG_IGN);
    epoll_fd = epoll_create1(0);

    static struct end listener;
    struct sockaddr_in address = loopback(atoi(argv[1]));
    listener.fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener.fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener.fd, 4096) < 0)
        die("listen");
    watch(&listener, EPOLL_CTL_ADD);

    for (;;) {
        static struct epoll_event events[256];
        int n = epoll_wait(epoll_fd, events, 256, -1);
        for (int i = 0; i < n; i++) {
            struct end *end = events[i].data.ptr;
            if (end == &listener) {
                accept_pair(listener.fd, upstream_ports[next_upstream++ % (unsigned)n_upstreams]);
                continue;
            }
            if (!end->closed && (events[i].events & EPOLLOUT) != 0)
                flush(end);
            if (!end->closed && (events[i].events & ~(uint32_t)EPOLLOUT) != 0)
                copy_to_peer(end);
        }
        free_closed();
    }
}
