/* What a client knows: the files that it has looked up or has open, and what its kernel remembers of them. */
#include "fsx.h"
#include <sys/uio.h>
#include <time.h>

pthread_mutex_t state = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
bool all_held, late_appends;
double cache = 5, lease = 90, fsync_takes; /* seconds */
int root;

double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

struct client *of(fuse_req_t req) { return fuse_req_userdata(req); }

struct inode *at(fuse_req_t req, fuse_ino_t ino) {
  return ino == FUSE_ROOT_ID ? &of(req)->root : (struct inode *)(uintptr_t)ino;
}

struct handle *handle(struct fuse_file_info *fi) { return (struct handle *)(uintptr_t)fi->fh; }

const char *path(int fd, char text[32]) {
  snprintf(text, 32, "/proc/self/fd/%d", fd);
  return text;
}

/* Waits while operations wait; then what this one fails with, or 0. */
int refused(fuse_req_t req, fuse_ino_t ino) {
  struct client *client = of(req);
  pthread_mutex_lock(&state);
  while ((all_held || client->held) && !client->gone) pthread_cond_wait(&changed, &state);
  int error = client->gone ? ENOTCONN : client->failure;
  if (!error && ino != FUSE_ROOT_ID && at(req, ino)->epoch != client->epoch) error = ESTALE;
  pthread_mutex_unlock(&state);
  return error;
}


struct name *take_name(struct name **link) {
  struct name *name = *link;
  *link = name->next;
  return name;
}

/* When a folder was changed last, on the server. */
struct timespec age_of(struct inode *folder) {
  struct stat found = {0};
  fstat(folder->fd, &found);
  return found.st_mtim;
}

/* Remembers that the kernel knows a name of a folder of this age; forgets those that it does not know any more. */
void remember(struct client *client, struct inode *folder, const char *text, struct timespec age) {
  struct name *name = malloc(sizeof *name + strlen(text) + 1);
  strcpy(name->text, text);
  name->until = now() + cache;
  name->age = age;
  pthread_mutex_lock(&client->lock);
  for (struct name **link = &folder->names; *link;)
    if ((*link)->until < now() || !strcmp((*link)->text, text)) free(take_name(link));
    else link = &(*link)->next;
  name->next = folder->names;
  folder->names = name;
  pthread_mutex_unlock(&client->lock);
}

/* The kernel is to ask for this name again: FUSE_NOTIFY_INVAL_ENTRY with FUSE_EXPIRE_ONLY, for which libfuses differ. */
void expire(struct client *client, fuse_ino_t folder, const char *name) {
  struct { uint32_t length; int32_t code; uint64_t unique, folder; uint32_t size, flags; } head =
    {sizeof head + strlen(name) + 1, 3, 0, folder, strlen(name), 1};
  struct iovec parts[] = {{&head, sizeof head}, {(void *)name, strlen(name) + 1}};
  if (writev(fuse_session_fd(client->session), parts, 2) == -1 && errno != ENOENT && errno != ENODEV) perror("fsx: expire");
}

void forget(struct client *client, struct inode *inode, uint64_t times) {
  pthread_mutex_lock(&client->lock);
  if (inode != &client->root && (inode->known -= times) == 0) {
    struct inode **link = &client->table[inode->ino % BUCKETS];
    while (*link != inode) link = &(*link)->next;
    *link = inode->next;
    while (inode->names) free(take_name(&inode->names));
    close(inode->fd);
    free(inode);
  }
  pthread_mutex_unlock(&client->lock);
}

int look(fuse_req_t req, fuse_ino_t parent, const char *name, struct fuse_entry_param *entry) {
  struct client *client = of(req);
  memset(entry, 0, sizeof *entry);
  entry->attr_timeout = entry->entry_timeout = cache;
  int fd = openat(at(req, parent)->fd, name, O_PATH | O_NOFOLLOW);
  if (fd == -1) return errno;
  if (fstatat(fd, "", &entry->attr, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) == -1) { close(fd); return errno; }
  pthread_mutex_lock(&client->lock);
  struct inode **bucket = &client->table[entry->attr.st_ino % BUCKETS], *inode = *bucket;
  while (inode && (inode->ino != entry->attr.st_ino || inode->dev != entry->attr.st_dev || inode->epoch != client->epoch))
    inode = inode->next;
  if (inode) close(fd);
  else {
    inode = malloc(sizeof *inode);
    *inode = (struct inode){*bucket, fd, entry->attr.st_dev, entry->attr.st_ino, client->epoch, 0, entry->attr, 0, NULL};
    *bucket = inode;
  }
  inode->known++;
  inode->attr = entry->attr;
  inode->until = now() + cache;
  pthread_mutex_unlock(&client->lock);
  entry->ino = (uintptr_t)inode;
  return 0;
}

void reply_look(fuse_req_t req, fuse_ino_t parent, const char *name) {
  struct fuse_entry_param entry;
  struct timespec age = age_of(at(req, parent)); /* before it is looked up: what changes meanwhile counts as new */
  int error = look(req, parent, name, &entry);
  remember(of(req), at(req, parent), name, age);
  if (error && error != ENOENT) fuse_reply_err(req, error);
  else fuse_reply_entry(req, &entry); /* with inode 0: that there is none may be cached, too */
}

struct handle *new_handle(struct handle **list, int fd, struct inode *inode) {
  struct handle *new = calloc(1, sizeof *new);
  *new = (struct handle){.next = *list, .at = list, .fd = fd, .inode = inode};
  if (new->next) new->next->at = &new->next;
  *list = new;
  return new;
}

void drop(struct handle *old) {
  *old->at = old->next;
  if (old->next) old->next->at = old->at;
  if (old->dir) closedir(old->dir); else close(old->fd);
  free(old);
}

void keep(fuse_req_t req, fuse_ino_t ino, int fd, struct fuse_file_info *fi) {
  struct client *client = of(req);
  pthread_mutex_lock(&client->lock);
  fi->fh = (uintptr_t)new_handle(&client->open, fd, at(req, ino));
  pthread_mutex_unlock(&client->lock);
  if (S_ISREG(at(req, ino)->attr.st_mode) && !fstat(fd, &at(req, ino)->attr)) at(req, ino)->until = now() + cache;
  fi->direct_io = handle(fi)->appends = !!(fi->flags & O_APPEND); /* the kernel's page cache would choose the offset itself */
}
