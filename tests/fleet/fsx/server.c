/* The server of the folder that the lab's nodes share, and one mount of it per node (see shared.py, which talks to it).

   Each node is a client with a kernel cache for itself, as with NFS. Names (also absent ones) and attributes are cached for some
   seconds, or until the next open of the file, or of the names' folder (close-to-open). Locks are the server's: those of a node
   without power live on until its lease is over. On demand operations wait or fail, of one node or all.

   Usage: fsx FOLDER, with a SOCK_SEQPACKET socket as standard input. A message is `WORD CLIENT NUMBER`; the answer is `ok`. */
#include "fsx.h"
#include <poll.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>

struct grave { struct grave *next; int fd; double until; }; /* of a lock whose client is gone */

static struct client *clients[CLIENTS];
static struct grave *graves;

/* Serves one client until its mount is gone; then all that it had open is closed, and what of it was locked is free. */
static void *serve(void *argument) {
  struct client *client = argument;
  struct pollfd mounted = {fuse_session_fd(client->session), POLLIN, 0};
  for (int i = 0; poll(&mounted, 1, 0) != 1 || mounted.revents != POLLIN; i++, usleep(5000))
    if (i > 6000) return NULL; /* nobody has mounted it in 30 s */
  struct fuse_loop_config *config = fuse_loop_cfg_create();
  fuse_loop_cfg_set_max_threads(config, 64); /* what waits must not keep from being served what it waits for */
  fuse_loop_cfg_set_idle_threads(config, 2);
  fuse_session_loop_mt(client->session, config);
  pthread_mutex_lock(&client->lock);
  while (client->open) drop(client->open);
  while (client->posix) drop(client->posix);
  for (int i = 0; i < BUCKETS; i++)
    for (struct inode *inode = client->table[i]; inode; inode = inode->next) close(inode->fd);
  pthread_mutex_unlock(&client->lock);
  return NULL; /* the little that is left of it may still be asked for, by its number */
}

static const char *begin(int number, int fd) {
  char mount[32], *words[] = {"fsx"};
  struct fuse_args arguments = FUSE_ARGS_INIT(1, words);
  struct client *client = calloc(1, sizeof *client);
  pthread_t thread;
  client->root.fd = root;
  pthread_mutex_init(&client->lock, NULL);
  client->session = fuse_session_new(&arguments, &operations, sizeof operations, client);
  snprintf(mount, sizeof mount, "/dev/fd/%d", fd);
  if (!client->session || fuse_session_mount(client->session, mount)) return "the session can't begin";
  clients[number] = client;
  if (pthread_create(&thread, NULL, serve, client)) return "no thread";
  pthread_detach(thread);
  return "ok";
}

/* Its locks live on for the time of a lease, and nothing else of it. */
static void bury(struct client *client) {
  pthread_mutex_lock(&client->lock);
  for (int i = 0; i < 2; i++)
    for (struct handle *lock = i ? client->posix : client->open; lock; lock = lock->next)
      if (lock->locked) {
        struct grave *grave = malloc(sizeof *grave);
        *grave = (struct grave){graves, dup(lock->fd), now() + lease};
        graves = grave;
      }
  client->gone = true;
  pthread_mutex_unlock(&client->lock);
}

/* The locks of a client that was out of reach for longer than a lease. */
static void expel(struct client *client) {
  pthread_mutex_lock(&client->lock);
  while (client->posix) drop(client->posix);
  for (struct handle *lock = client->open; lock; lock = lock->next)
    if (lock->locked) flock(lock->fd, LOCK_UN), lock->locked = false;
  pthread_mutex_unlock(&client->lock);
}

static void *watch_leases(void *unused) {
  (void)unused;
  for (;; usleep(50000)) {
    pthread_mutex_lock(&state);
    for (struct grave **link = &graves, *grave; (grave = *link);) {
      if (grave->until > now()) { link = &grave->next; continue; }
      *link = grave->next;
      close(grave->fd);
      free(grave);
    }
    for (int i = 0; i < CLIENTS; i++)
      if (clients[i] && clients[i]->held && now() - clients[i]->held_since > lease) expel(clients[i]);
    pthread_mutex_unlock(&state);
  }
  return NULL;
}

static const char *obey(const char *word, int which, double number, int fd) {
  if (!strcmp(word, "serve")) return begin(which, fd);
  if (!strcmp(word, "cache")) cache = number;
  else if (!strcmp(word, "lease")) lease = number;
  else if (!strcmp(word, "fsync")) fsync_takes = number;
  else if (!strcmp(word, "append")) late_appends = number;
  else if (!strcmp(word, "hold") && which < 0) all_held = number;
  else for (int i = 0; i < CLIENTS; i++) {
    struct client *client = clients[i];
    if (!client || (which >= 0 && which != i)) continue;
    if (!strcmp(word, "vanish")) bury(client);
    else if (!strcmp(word, "hold")) client->held = number, client->held_since = now();
    else if (!strcmp(word, "fail")) client->failure = number;
    else if (!strcmp(word, "stale")) client->epoch++;
    else return "unknown word";
  }
  pthread_cond_broadcast(&changed);
  return "ok";
}

int main(int count, char **arguments) {
  struct rlimit files = {1 << 20, 1 << 20};
  pthread_t thread;
  setrlimit(RLIMIT_NOFILE, &files);
  umask(0);
  if (count != 2 || (root = open(arguments[1], O_PATH | O_DIRECTORY)) == -1) return 2;
  if (pthread_create(&thread, NULL, watch_leases, NULL)) return 1;
  for (;;) {
    char text[128], word[16], space[CMSG_SPACE(sizeof(int))];
    int which = -1, fd = -1;
    double number = 0;
    struct iovec part = {text, sizeof text - 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t length = recvmsg(0, &message, MSG_CMSG_CLOEXEC);
    if (length <= 0) return 0;
    text[length] = 0;
    struct cmsghdr *with = CMSG_FIRSTHDR(&message);
    if (with) memcpy(&fd, CMSG_DATA(with), sizeof fd);
    sscanf(text, "%15s %d %lf", word, &which, &number);
    pthread_mutex_lock(&state);
    const char *answer = which < CLIENTS ? obey(word, which, number, fd) : "no such client";
    pthread_mutex_unlock(&state);
    if (send(0, answer, strlen(answer), 0) == -1) return 1;
  }
}
