/*
Libraries that are loaded when a function of theirs is first called: linked directly they would cost
every start of the program, or keep it from starting where they aren't installed.
*/
#pragma once

#include <stdbool.h>

#define LIBRARY_TEXT_OF(x) #x
#define LIBRARY_FILE(name, major) "lib" name ".so." LIBRARY_TEXT_OF(major)

typedef struct {
    const char *file;
    const char *name;   // as people know it
    const char *remedy; // what to do where it is missing
    void *handle;
} Library;

// Loads the library, which is looked for where the program was linked to look, too. Returns false
// where it isn't on this machine.
bool library_load(Library *library);

// Returns the address of a function; dies where the library, or in it the function, is missing.
void *library_function(Library *library, const char *name);

// Stands for the library's function `name`, which its header declares, in a call: looked up at the
// first one.
#define LIBRARY_CALL(library, name)                                             \
    (*({                                                                        \
        static __typeof__(&name) address;                                       \
        if (!address) *(void **)&address = library_function(&(library), #name); \
        address;                                                                \
    }))
