#include "library.h"
#include "util.h" // die

#include <dlfcn.h>

bool library_load(Library *library) {
    if (!library->handle) library->handle = dlopen(library->file, RTLD_NOW);
    return library->handle != NULL;
}

void *library_function(Library *library, const char *name) {
    if (!library_load(library)) die("%s can't be loaded: %s; %s", library->name, dlerror(), library->remedy);
    void *address = dlsym(library->handle, name);
    if (!address) die("this %s is too old: %s", library->name, dlerror());
    return address;
}
