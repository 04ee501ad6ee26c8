/* What the parts of the server know of each other: clients (clients.c), what they do (files.c), who tells it what (server.c). */
#define FUSE_USE_VERSION 312 /* that of 2022-09 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CLIENTS = 512, BUCKETS = 4096 };

struct name { struct name *next; double until; struct timespec age; char text[]; };
struct inode {
  struct inode *next;
  int fd;
  dev_t dev;
  ino_t ino;
  unsigned epoch;
  uint64_t known;
  struct stat attr; /* as this client knows them, for a while: the kernel asks more often than a client of NFS */
  double until;
  struct name *names; /* of a folder: what the kernel has been told of lately, also that it is absent */
};
struct handle { struct handle *next, **at; int fd; DIR *dir; uint64_t owner; struct inode *inode; bool locked, appends; };
struct client {
  struct fuse_session *session;
  struct inode root, *table[BUCKETS];
  struct handle *open, *posix; /* what is open; what holds locks of fcntl(2): one for each inode and owner */
  pthread_mutex_t lock;
  unsigned epoch; /* handles of an earlier one are stale */
  bool gone, held;
  int failure; /* what every operation answers; 0: what is true */
  double held_since;
};

extern const struct fuse_lowlevel_ops operations;
extern pthread_mutex_t state; /* of the variables below, and of what is done to a client */
extern pthread_cond_t changed;
extern bool all_held, late_appends;
extern double cache, lease, fsync_takes; /* seconds */
extern int root;

double now(void);
struct client *of(fuse_req_t req);
struct inode *at(fuse_req_t req, fuse_ino_t ino);
struct handle *handle(struct fuse_file_info *fi);
const char *path(int fd, char text[32]);
int refused(fuse_req_t req, fuse_ino_t ino);

struct name *take_name(struct name **link);
void remember(struct client *client, struct inode *folder, const char *text, struct timespec age);
struct timespec age_of(struct inode *folder);
void expire(struct client *client, fuse_ino_t folder, const char *name);
int look(fuse_req_t req, fuse_ino_t parent, const char *name, struct fuse_entry_param *entry);
void reply_look(fuse_req_t req, fuse_ino_t parent, const char *name);
void forget(struct client *client, struct inode *inode, uint64_t times);

struct handle *new_handle(struct handle **list, int fd, struct inode *inode);
void keep(fuse_req_t req, fuse_ino_t ino, int fd, struct fuse_file_info *fi);
void drop(struct handle *old);

/* Answers with an error and returns, if there is one. */
#define REFUSE(error) do { int e_ = (error); if (e_) { fuse_reply_err(req, e_); return; } } while (0)
#define TRY(call) REFUSE((call) == -1 ? errno : 0)
