/* The operations of the shared folder, each done on the server's disk. */
#include "fsx.h"
#include <sys/file.h>
#include <sys/statvfs.h>

static void do_lookup(fuse_req_t req, fuse_ino_t parent, const char *name) {
  REFUSE(refused(req, parent));
  reply_look(req, parent, name);
}

static void do_forget(fuse_req_t req, fuse_ino_t ino, uint64_t times) {
  forget(of(req), at(req, ino), times);
  fuse_reply_none(req);
}

static void changed_by(struct inode *inode) { inode->until = 0; } /* this client, which asks for the attributes again */

static void do_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
  struct inode *inode = at(req, ino);
  struct stat found;
  REFUSE(refused(req, ino));
  if (inode->until <= now()) {
    TRY(fstatat(inode->fd, "", &found, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW));
    REFUSE(found.st_nlink == 0 && !fi ? ESTALE : 0); /* another client has removed it */
    inode->attr = found;
    inode->until = now() + cache;
  }
  fuse_reply_attr(req, &inode->attr, inode->until - now());
}

static void do_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *to, int valid, struct fuse_file_info *fi) {
  char text[32];
  REFUSE(refused(req, ino));
  int fd = at(req, ino)->fd;
  path(fd, text);
  if (valid & FUSE_SET_ATTR_MODE) TRY(chmod(text, to->st_mode));
  if (valid & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID)) {
    uid_t user = valid & FUSE_SET_ATTR_UID ? to->st_uid : (uid_t)-1;
    TRY(fchownat(fd, "", user, valid & FUSE_SET_ATTR_GID ? to->st_gid : (gid_t)-1, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW));
  }
  if (valid & FUSE_SET_ATTR_SIZE) TRY(truncate(text, to->st_size));
  if (valid & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME)) {
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_OMIT}};
    if (valid & FUSE_SET_ATTR_ATIME) times[0] = to->st_atim;
    if (valid & FUSE_SET_ATTR_MTIME) times[1] = to->st_mtim;
    if (valid & FUSE_SET_ATTR_ATIME_NOW) times[0].tv_nsec = UTIME_NOW;
    if (valid & FUSE_SET_ATTR_MTIME_NOW) times[1].tv_nsec = UTIME_NOW;
    TRY(utimensat(AT_FDCWD, text, times, 0));
  }
  changed_by(at(req, ino));
  do_getattr(req, ino, fi);
}

static void do_readlink(fuse_req_t req, fuse_ino_t ino) {
  char text[4097];
  REFUSE(refused(req, ino));
  ssize_t length = readlinkat(at(req, ino)->fd, "", text, 4096);
  TRY(length);
  text[length] = 0;
  fuse_reply_readlink(req, text);
}

/* Makes the new name its maker's and answers with it. */
static void reply_new(fuse_req_t req, fuse_ino_t parent, const char *name) {
  const struct fuse_ctx *who = fuse_req_ctx(req);
  fchownat(at(req, parent)->fd, name, who->uid, who->gid, AT_SYMLINK_NOFOLLOW);
  changed_by(at(req, parent));
  reply_look(req, parent, name);
}

static void do_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t device) {
  REFUSE(refused(req, parent));
  TRY(mknodat(at(req, parent)->fd, name, mode, device));
  reply_new(req, parent, name);
}

static void do_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode) {
  REFUSE(refused(req, parent));
  TRY(mkdirat(at(req, parent)->fd, name, mode));
  reply_new(req, parent, name);
}

static void do_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name) {
  REFUSE(refused(req, parent));
  TRY(symlinkat(target, at(req, parent)->fd, name));
  reply_new(req, parent, name);
}

static void do_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t parent, const char *name) {
  char text[32];
  REFUSE(refused(req, ino));
  REFUSE(refused(req, parent));
  TRY(linkat(AT_FDCWD, path(at(req, ino)->fd, text), at(req, parent)->fd, name, AT_SYMLINK_FOLLOW));
  changed_by(at(req, ino));
  changed_by(at(req, parent));
  reply_look(req, parent, name);
}

static void do_unlink(fuse_req_t req, fuse_ino_t parent, const char *name) {
  REFUSE(refused(req, parent));
  TRY(unlinkat(at(req, parent)->fd, name, 0));
  changed_by(at(req, parent));
  fuse_reply_err(req, 0);
}

static void do_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name) {
  REFUSE(refused(req, parent));
  TRY(unlinkat(at(req, parent)->fd, name, AT_REMOVEDIR));
  changed_by(at(req, parent));
  fuse_reply_err(req, 0);
}

static void do_rename(fuse_req_t req, fuse_ino_t from, const char *name, fuse_ino_t to, const char *new, unsigned flags) {
  REFUSE(refused(req, from));
  REFUSE(refused(req, to));
  REFUSE(flags ? EINVAL : 0); /* as NFS */
  TRY(renameat(at(req, from)->fd, name, at(req, to)->fd, new));
  changed_by(at(req, from));
  changed_by(at(req, to));
  fuse_reply_err(req, 0);
}

static int flags_of(struct fuse_file_info *fi) { /* the client has chosen the offset of an append */
  return fi->flags & ~(O_APPEND | O_NOFOLLOW | O_CREAT | O_EXCL | O_DIRECT);
}

static void do_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
  char text[32];
  struct stat found;
  REFUSE(refused(req, ino));
  TRY(fstat(at(req, ino)->fd, &found));
  REFUSE(found.st_nlink == 0 ? ESTALE : 0); /* its name is another file's now: the kernel looks it up again */
  int fd = open(path(at(req, ino)->fd, text), flags_of(fi));
  TRY(fd);
  keep(req, ino, fd, fi);
  fuse_lowlevel_notify_inval_inode(of(req)->session, ino, -1, 0); /* an open asks for the size anew */
  fuse_reply_open(req, fi);
}

static void do_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi) {
  struct fuse_entry_param entry;
  const struct fuse_ctx *who = fuse_req_ctx(req);
  REFUSE(refused(req, parent));
  int folder = at(req, parent)->fd, fd = openat(folder, name, flags_of(fi) | O_CREAT | O_EXCL, mode);
  if (fd != -1) TRY(fchown(fd, who->uid, who->gid));
  else if (errno == EEXIST && !(fi->flags & O_EXCL)) fd = openat(folder, name, flags_of(fi));
  TRY(fd);
  changed_by(at(req, parent));
  struct timespec age = age_of(at(req, parent));
  int error = look(req, parent, name, &entry);
  remember(of(req), at(req, parent), name, age);
  if (error) close(fd);
  REFUSE(error);
  keep(req, entry.ino, fd, fi);
  fuse_reply_create(req, &entry, fi);
}

static void do_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi) {
  struct fuse_bufvec buffer = FUSE_BUFVEC_INIT(size);
  REFUSE(refused(req, ino));
  buffer.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
  buffer.buf[0].fd = handle(fi)->fd;
  buffer.buf[0].pos = offset;
  fuse_reply_data(req, &buffer, FUSE_BUF_SPLICE_MOVE);
}

static void do_write(fuse_req_t req, fuse_ino_t ino, struct fuse_bufvec *data, off_t offset, struct fuse_file_info *fi) {
  struct fuse_bufvec to = FUSE_BUFVEC_INIT(fuse_buf_size(data));
  REFUSE(refused(req, ino));
  to.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
  to.buf[0].fd = handle(fi)->fd;
  struct inode *inode = at(req, ino);
  struct stat found;
  if (handle(fi)->appends) { /* at the end that the server knows; or that this client knew when it opened the file */
    TRY(fstat(handle(fi)->fd, &found));
    offset = late_appends ? inode->attr.st_size : found.st_size;
  }
  to.buf[0].pos = offset;
  ssize_t written = fuse_buf_copy(&to, data, 0);
  REFUSE(written < 0 ? -written : 0);
  if (offset + written > inode->attr.st_size) inode->attr.st_size = offset + written;
  changed_by(inode);
  fuse_reply_write(req, written);
}

/* The end of all that this owner has locked in a file by fcntl(2): it has closed it. */
static void do_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
  struct client *client = of(req);
  REFUSE(refused(req, ino));
  pthread_mutex_lock(&client->lock);
  for (struct handle *next, *lock = client->posix; lock; lock = next) {
    next = lock->next;
    if (lock->inode == at(req, ino) && lock->owner == fi->lock_owner) drop(lock);
  }
  pthread_mutex_unlock(&client->lock);
  fuse_reply_err(req, 0);
}

static void do_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
  struct client *client = of(req);
  (void)ino;
  (void)refused(req, FUSE_ROOT_ID); /* it waits, and can't fail */
  pthread_mutex_lock(&client->lock);
  drop(handle(fi));
  pthread_mutex_unlock(&client->lock);
  fuse_reply_err(req, 0);
}

static void do_fsync(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi) {
  (void)datasync;
  (void)fi;
  if (fsync_takes > 0) usleep(fsync_takes * 1e6);
  REFUSE(refused(req, ino)); /* what the server has, it keeps: the power of this machine does not fail in a test */
  fuse_reply_err(req, 0);
}

/* Whoever opens a folder that has changed sees that, and so does whoever asks for a name in it after that. */
static void do_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi) {
  struct client *client = of(req);
  struct inode *inode = at(req, ino);
  struct stat found;
  REFUSE(refused(req, ino));
  TRY(fstat(inode->fd, &found));
  REFUSE(found.st_nlink == 0 ? ESTALE : 0);
  int fd = openat(inode->fd, ".", O_RDONLY | O_DIRECTORY);
  TRY(fd);
  keep(req, ino, fd, fi);
  handle(fi)->dir = fdopendir(fd);
  pthread_mutex_lock(&client->lock);
  struct name *old = NULL;
  for (struct name **link = &inode->names; *link;) {
    struct name *name = *link;
    if (!memcmp(&name->age, &found.st_mtim, sizeof name->age)) { link = &name->next; continue; }
    take_name(link);
    name->next = old;
    old = name;
  }
  bool same = !memcmp(&found.st_mtim, &inode->attr.st_mtim, sizeof found.st_mtim);
  inode->attr = found;
  inode->until = now() + cache;
  pthread_mutex_unlock(&client->lock);
  for (; old; free(take_name(&old))) expire(client, ino, old->text);
  if (!same) fuse_lowlevel_notify_inval_inode(client->session, ino, -1, 0);
  fi->cache_readdir = fi->keep_cache = 1;
  fuse_reply_open(req, fi);
}

static void do_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi) {
  DIR *dir = handle(fi)->dir;
  struct dirent *entry;
  REFUSE(refused(req, ino));
  char *text = malloc(size);
  size_t used = 0;
  seekdir(dir, offset);
  while ((entry = readdir(dir))) {
    struct stat found = {.st_ino = entry->d_ino, .st_mode = DTTOIF(entry->d_type)};
    size_t needs = fuse_add_direntry(req, text + used, size - used, entry->d_name, &found, entry->d_off);
    if (needs > size - used) break;
    used += needs;
  }
  fuse_reply_buf(req, text, used);
  free(text);
}

static void do_statfs(fuse_req_t req, fuse_ino_t ino) {
  struct statvfs found;
  REFUSE(refused(req, ino));
  TRY(fstatvfs(root, &found));
  fuse_reply_statfs(req, &found);
}

static void do_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t offset, off_t length, struct fuse_file_info *fi) {
  REFUSE(refused(req, ino));
  TRY(fallocate(handle(fi)->fd, mode, offset, length));
  fuse_reply_err(req, 0);
}

static void do_flock(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, int operation) {
  REFUSE(refused(req, ino));
  while (flock(handle(fi)->fd, operation | LOCK_NB) == -1) {
    REFUSE(errno != EWOULDBLOCK || operation & LOCK_NB ? errno : fuse_req_interrupted(req) ? EINTR : 0);
    usleep(20000);
    REFUSE(refused(req, ino));
  }
  handle(fi)->locked = !(operation & LOCK_UN);
  fuse_reply_err(req, 0);
}

/* The description whose locks are this owner's in this file; -1 and errno. Linux has locks of descriptions: F_OFD_SETLK. */
static int lock_of(fuse_req_t req, fuse_ino_t ino, uint64_t owner) {
  char text[32];
  struct client *client = of(req);
  pthread_mutex_lock(&client->lock);
  struct handle *lock = client->posix;
  while (lock && (lock->inode != at(req, ino) || lock->owner != owner)) lock = lock->next;
  int fd = lock ? lock->fd : open(path(at(req, ino)->fd, text), O_RDWR);
  if (!lock && fd != -1) {
    lock = new_handle(&client->posix, fd, at(req, ino));
    lock->owner = owner;
    lock->locked = true;
  }
  pthread_mutex_unlock(&client->lock);
  return fd;
}

static void do_getlk(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, struct flock *lock) {
  REFUSE(refused(req, ino));
  int fd = lock_of(req, ino, fi->lock_owner);
  TRY(fd);
  lock->l_pid = 0;
  TRY(fcntl(fd, F_OFD_GETLK, lock));
  lock->l_pid = 0; /* a process of another machine, perhaps */
  fuse_reply_lock(req, lock);
}

static void do_setlk(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi, struct flock *lock, int wait) {
  REFUSE(refused(req, ino));
  int fd = lock_of(req, ino, fi->lock_owner);
  TRY(fd);
  lock->l_pid = 0;
  while (fcntl(fd, F_OFD_SETLK, lock) == -1) {
    REFUSE((errno != EAGAIN && errno != EACCES) || !wait ? errno : fuse_req_interrupted(req) ? EINTR : 0);
    usleep(20000);
    REFUSE(refused(req, ino));
  }
  fuse_reply_err(req, 0);
}

const struct fuse_lowlevel_ops operations = {
  .lookup = do_lookup, .forget = do_forget, .getattr = do_getattr, .setattr = do_setattr, .readlink = do_readlink,
  .mknod = do_mknod,
  .mkdir = do_mkdir, .symlink = do_symlink, .link = do_link, .unlink = do_unlink, .rmdir = do_rmdir, .rename = do_rename,
  .open = do_open, .create = do_create, .read = do_read, .write_buf = do_write, .flush = do_flush, .release = do_release,
  .fsync = do_fsync, .fsyncdir = do_fsync, .opendir = do_opendir, .readdir = do_readdir, .releasedir = do_release,
  .statfs = do_statfs, .fallocate = do_fallocate, .flock = do_flock, .getlk = do_getlk, .setlk = do_setlk,
};
