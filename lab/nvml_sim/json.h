/* A small JSON reader: enough of RFC 8259 for a facts file of a few kilobytes.
 * A \u escape above ASCII reads as '?': no name that NVML reports needs one. */
#ifndef NVML_SIM_JSON_H
#define NVML_SIM_JSON_H

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum json_type { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

struct json {
    enum json_type type;
    double number;
    char *string;      /* value of a string */
    char *key;         /* name of this member when the parent is an object */
    struct json *child; /* first member or element */
    struct json *next;
};

struct json_reader {
    const char *at;
    int line;
    const char *error;
};

#define JSON_DEEPEST 32

static void json_free(struct json *node)
{
    while (node) {
        struct json *next = node->next;
        json_free(node->child);
        free(node->string);
        free(node->key);
        free(node);
        node = next;
    }
}

static void json_blank(struct json_reader *in)
{
    while (*in->at == ' ' || *in->at == '\t' || *in->at == '\r' || *in->at == '\n') {
        if (*in->at == '\n')
            in->line++;
        in->at++;
    }
}

static void *json_fail(struct json_reader *in, const char *error)
{
    if (!in->error)
        in->error = error;
    return NULL;
}

static char *json_text(struct json_reader *in)
{
    if (*in->at != '"')
        return json_fail(in, "a string was expected");
    char *out = malloc(strlen(in->at) + 1);
    size_t used = 0;
    if (!out)
        return json_fail(in, "out of memory");
    for (in->at++; *in->at != '"'; in->at++) {
        char letter = *in->at;
        if ((unsigned char)letter < 0x20) {
            free(out);
            return json_fail(in, "a string does not end");
        }
        if (letter == '\\') {
            letter = *++in->at;
            switch (letter) {
            case '"': case '\\': case '/': break;
            case 'b': letter = '\b'; break;
            case 'f': letter = '\f'; break;
            case 'n': letter = '\n'; break;
            case 'r': letter = '\r'; break;
            case 't': letter = '\t'; break;
            case 'u': {
                unsigned code = 0;
                for (int digit = 0; digit < 4; digit++) {
                    char hex = *++in->at;
                    if (!isxdigit((unsigned char)hex)) {
                        free(out);
                        return json_fail(in, "\\u needs four hex digits");
                    }
                    code = code * 16 + (unsigned)(isdigit((unsigned char)hex) ? hex - '0' : (hex | 32) - 'a' + 10);
                }
                letter = code && code < 0x80 ? (char)code : '?';
                break;
            }
            default:
                free(out);
                return json_fail(in, "unknown escape in a string");
            }
        }
        out[used++] = letter;
    }
    in->at++;
    out[used] = 0;
    return out;
}

static struct json *json_value(struct json_reader *in, int depth);

/* Read the members of an object or the elements of an array, past the opening bracket. */
static int json_members(struct json_reader *in, struct json *parent, char close, int depth)
{
    struct json **tail = &parent->child;
    json_blank(in);
    if (*in->at == close) {
        in->at++;
        return 1;
    }
    for (;;) {
        char *key = NULL;
        json_blank(in);
        if (close == '}') {
            key = json_text(in);
            if (!key)
                return 0;
            json_blank(in);
            if (*in->at != ':') {
                free(key);
                json_fail(in, "':' was expected");
                return 0;
            }
            in->at++;
        }
        struct json *member = json_value(in, depth + 1);
        if (!member) {
            free(key);
            return 0;
        }
        member->key = key;
        *tail = member;
        tail = &member->next;
        json_blank(in);
        if (*in->at == close) {
            in->at++;
            return 1;
        }
        if (*in->at != ',') {
            json_fail(in, "',' or a closing bracket was expected");
            return 0;
        }
        in->at++;
    }
}

static struct json *json_value(struct json_reader *in, int depth)
{
    if (depth > JSON_DEEPEST)
        return json_fail(in, "nested too deeply");
    json_blank(in);
    struct json *node = calloc(1, sizeof *node);
    if (!node)
        return json_fail(in, "out of memory");
    int good = 1;
    if (*in->at == '{' || *in->at == '[') {
        node->type = *in->at == '{' ? JSON_OBJECT : JSON_ARRAY;
        in->at++;
        good = json_members(in, node, node->type == JSON_OBJECT ? '}' : ']', depth);
    } else if (*in->at == '"') {
        node->type = JSON_STRING;
        node->string = json_text(in);
        good = node->string != NULL;
    } else if (!strncmp(in->at, "true", 4)) {
        node->type = JSON_TRUE;
        in->at += 4;
    } else if (!strncmp(in->at, "false", 5)) {
        node->type = JSON_FALSE;
        in->at += 5;
    } else if (!strncmp(in->at, "null", 4)) {
        node->type = JSON_NULL;
        in->at += 4;
    } else if (*in->at == '-' || isdigit((unsigned char)*in->at)) {
        char *end;
        node->type = JSON_NUMBER;
        node->number = strtod(in->at, &end);
        in->at = end;
    } else {
        json_fail(in, "a value was expected");
        good = 0;
    }
    if (!good) {
        json_free(node);
        return NULL;
    }
    return node;
}

/* Parse a whole file; on failure NULL, with the reason on stderr. */
static struct json *json_load(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    size_t used = 0, room = 0, got;
    char *text = NULL;
    do {
        if (used + 1 >= room) {
            char *more = realloc(text, room = room ? room * 2 : 65536);
            if (!more) {
                free(text);
                fclose(file);
                return NULL;
            }
            text = more;
        }
        got = fread(text + used, 1, room - used - 1, file);
        used += got;
    } while (got);
    fclose(file);
    text[used] = 0;

    struct json_reader in = {text, 1, NULL};
    struct json *root = json_value(&in, 0);
    if (root) {
        json_blank(&in);
        if (*in.at) {
            json_fail(&in, "more text follows the value");
            json_free(root);
            root = NULL;
        }
    }
    if (!root)
        fprintf(stderr, "nvml_sim: %s:%d: %s\n", path, in.line, in.error);
    free(text);
    return root;
}

/* The member `key` of an object; NULL when it is absent, null, or `node` is no object. */
static const struct json *json_get(const struct json *node, const char *key)
{
    if (!node || node->type != JSON_OBJECT)
        return NULL;
    for (const struct json *member = node->child; member; member = member->next)
        if (!strcmp(member->key, key))
            return member->type == JSON_NULL ? NULL : member;
    return NULL;
}

static const char *json_string(const struct json *node, const char *key)
{
    const struct json *member = json_get(node, key);
    return member && member->type == JSON_STRING ? member->string : NULL;
}

/* Number or boolean as a double; `otherwise` when it is absent. */
static double json_number(const struct json *node, const char *key, double otherwise)
{
    const struct json *member = json_get(node, key);
    if (!member)
        return otherwise;
    if (member->type == JSON_TRUE || member->type == JSON_FALSE)
        return member->type == JSON_TRUE;
    return member->type == JSON_NUMBER ? member->number : otherwise;
}

#endif
