/* The floor under one-to-many over TCP: blocking sockets, one buffer, reused memory in huge pages.

     one_to_many send '{"nbytes": N, "receivers": R}'
     one_to_many receive '{"nbytes": N, "port": P}'

   A child of the benchmark (measure/child.py): a first line of JSON when it is ready, then one for each line.
   The sender writes 4 MiB at a time, a thread a receiver, all out of the one buffer. A receiver takes what comes
   into its own; for a line with "verify" it hashes each 4 MiB as soon as it is whole, as dcs does. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CHUNK ((size_t)4 << 20)
#define MOST_RECEIVERS 64

typedef uint64_t (*hash_function)(const void *, size_t);

static char *buffer;
static size_t nbytes;

static void require(int holds, const char *what) {
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static double monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static long number(const char *words, const char *name) {
    char key[64];
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *found = strstr(words, key);
    require(found != NULL, name);
    return atol(found + strlen(key));
}

static void take_memory(int fill) {
    size_t page = (size_t)2 << 20, rounded = (nbytes + page - 1) / page * page;
    char *raw = mmap(NULL, rounded + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(raw != MAP_FAILED, "mmap");
    buffer = (char *)(((uintptr_t)raw + page - 1) / page * page);
    madvise(buffer, rounded, MADV_HUGEPAGE);
    for (size_t at = 0; at < nbytes; at++) buffer[at] = fill ? (char)((at * 2654435761u) >> 13) : 0;
}

static uint64_t fold(void) {
    uint64_t sum = 14695981039346656037u;
    for (size_t at = 0; at < nbytes; at++) sum = (sum ^ (unsigned char)buffer[at]) * 1099511628211u;
    return sum;
}

static void *send_all(void *connection) {
    int fd = *(int *)connection;
    for (size_t at = 0; at < nbytes;) {
        size_t left = nbytes - at;
        ssize_t sent = send(fd, buffer + at, left < CHUNK ? left : CHUNK, MSG_NOSIGNAL);
        require(sent > 0, "send");
        at += sent;
    }
    return NULL;
}

static void sender(const char *words) {
    int receivers = (int)number(words, "receivers"), connections[MOST_RECEIVERS];
    require(receivers >= 1 && receivers <= MOST_RECEIVERS, "receivers");
    take_memory(1);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    require(listener >= 0, "socket");
    require(bind(listener, (struct sockaddr *)&address, length) == 0, "bind");
    require(listen(listener, MOST_RECEIVERS) == 0, "listen");
    require(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    printf("{\"port\": %d}\n", ntohs(address.sin_port));
    fflush(stdout);
    for (int at = 0; at < receivers; at++) {
        connections[at] = accept(listener, NULL, NULL);
        require(connections[at] >= 0, "accept");
    }
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        if (strstr(line, "\"sum\"")) {
            printf("{\"sum\": \"%016lx\"}\n", (unsigned long)fold());
        } else {
            double begun = monotonic();
            pthread_t threads[MOST_RECEIVERS];
            for (int at = 0; at < receivers; at++)
                require(pthread_create(&threads[at], NULL, send_all, &connections[at]) == 0, "pthread_create");
            for (int at = 0; at < receivers; at++) pthread_join(threads[at], NULL);
            printf("{\"begun\": %.9f}\n", begun);
        }
        fflush(stdout);
    }
}

static void receiver(const char *words) {
    take_memory(0);
    struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
        .sin_port = htons((uint16_t)number(words, "port")),
    };
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    require(fd >= 0, "socket");
    require(connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    void *library = dlopen("libxxhash.so.0", RTLD_NOW);
    hash_function hash = library ? (hash_function)dlsym(library, "XXH3_64bits") : NULL;
    printf("{\"verifies\": %s}\n", hash ? "true" : "false");
    fflush(stdout);
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        if (strstr(line, "\"sum\"")) {
            printf("{\"sum\": \"%016lx\"}\n", (unsigned long)fold());
        } else {
            int verify = strstr(line, "\"verify\": true") != NULL;
            uint64_t hashes = 0;
            for (size_t at = 0, hashed = 0; at < nbytes;) {
                size_t until = hashed + CHUNK < nbytes ? hashed + CHUNK : nbytes;
                ssize_t got = recv(fd, buffer + at, until - at, 0);
                require(got > 0, "recv");
                at += got;
                if (at == until) {
                    if (verify) hashes += hash(buffer + hashed, until - hashed);
                    hashed = until;
                }
            }
            printf("{\"done\": %.9f, \"hashes\": \"%016lx\"}\n", monotonic(), (unsigned long)hashes);
        }
        fflush(stdout);
    }
}

int main(int count, char **words) {
    require(count == 3, "one_to_many send|receive WORK");
    nbytes = (size_t)number(words[2], "nbytes");
    if (strcmp(words[1], "send") == 0)
        sender(words[2]);
    else
        receiver(words[2]);
    return 0;
}
