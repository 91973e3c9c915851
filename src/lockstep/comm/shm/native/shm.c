/* What ranks do in the memory that they share. Plain C11 for Linux, compiled by hatch_build.py. */

#define EXPORT __attribute__((visibility("default")))

EXPORT const char *lockstep_shm_source(void);

/* SHA-256 of this file as it was compiled, which `load` compares with the file beside the library. */
EXPORT const char *lockstep_shm_source(void) {
    return LOCKSTEP_SHM_SOURCE;
}
