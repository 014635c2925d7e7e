import datetime
import time
import types

import pytest
from vocabularies import byte_tokenizer

from specjax.io.chat import render_chat

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' -}}
    {% endif %}
    {{- '<|im_start|>' ~ message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
{% endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0]['content'] | trim -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
{%- endif -%}
{{- '<|start|>system<|end|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n' + system + '<|eot|>' }}
{%- for message in messages if message.content -%}
    {%- set ns = namespace(text=message.content) -%}
    {%- if message.role == 'assistant' and '</think>' in ns.text -%}
        {%- set ns.text = ns.text.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|start|>' ~ message.role ~ '<|end|>\\n\\n' ~ ns.text ~ '<|eot|>' }}
    {%- generation %}{{ loop.index0 }}/{{ loop.length }}{{ ',' if not loop.last }}{% endgeneration %}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif -%}
"""
INSTRUCTIONS = """\
{%- macro ends(text) -%}{{ text }}{{ eos_token }}{%- endmacro -%}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) and message.role != 'system' %}
        {{- raise_exception('roles must alternate, got ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + ends(message.content) }}
    {%- endif %}
{%- endfor %}
"""
JSON = """\
{% for message in messages %}
{{ message | tojson }} {{ message | tojson(indent=2) }}
{% if loop.index == 2 %}{% break %}{% endif %}
{% endfor %}"""
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": " <b>\"q\" & 'é'\n\n漢 👩 {{ x }} "},
        {"role": "assistant", "content": "<think>\na</think>\n\nOk"},
    ],
    [{"role": "system", "content": "  Sys  "}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "r", "name": "n"},
    ],
]
USER = [{"role": "user", "content": "Hi"}]


def render(template, messages=USER, **options):
    return render_chat(template, messages, special_tokens=SPECIAL, **options)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, HEADERS, INSTRUCTIONS, JSON])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_same_text_as_transformers(template, messages, add_generation_prompt):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend, chat_template=template, **SPECIAL)
    options = {"add_generation_prompt": add_generation_prompt}
    try:
        expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        with pytest.raises(ValueError, match=str(error)):
            render(template, messages, **options)
    else:
        assert render(template, messages, **options) == expected


def test_known_text():
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    user = "<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML) == system + user + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == system + user


def test_the_time_is_the_one_that_is_given_or_the_clocks():
    template = "{{ strftime_now('%d %b %Y %H:%M') }}"
    assert render(template, now=datetime.datetime(2024, 7, 26, 9, 5)) == "26 Jul 2024 09:05"
    before, told, after = (
        datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        render("{{ strftime_now('%Y-%m-%d %H:%M') }}"),
        datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
    )
    assert before <= told <= after


def test_error_of_the_template_is_told():
    with pytest.raises(ValueError, match="renders these messages, got: roles must alternate, got assistant"):
        render(INSTRUCTIONS, [{"role": "assistant", "content": "x"}])


def test_messages_are_not_changed():
    messages = [dict(message) for message in USER]
    for template in ("{% set messages[0].role = 'x' %}", "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}"):
        with pytest.raises(ValueError, match="expected a chat template"):
            render(template, messages)
    assert messages == USER


def test_any_mapping_is_a_message():
    message = types.MappingProxyType(USER[0])
    assert render("{{ messages[0] | tojson }}", [message]) == '{"role": "user", "content": "Hi"}'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__ }}", "access to '__class__' of a list"),
        ("{% if ''.__class__.__mro__ %}{% endif %}", "access to '__class__' of a str"),
        ("{{ ''['__class__'] }}", "access to '__class__' of a str"),
        ("{{ '' | attr('__class__') }}", "access to '__class__' of a str"),
        ("{{ '{0.__class__}'.format(1) }}", "access to '__class__' of a int"),
        ("{{ raise_exception.__globals__ }}", "access to '__globals__' of a function"),
        ("{{ (messages | map(attribute='__class__') | list)[0] }}", "access to '__class__' of a dict"),
        ("{{ cycler.__init__.__globals__ }}", "access to '__init__' of a type"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "the private name '__init__'"),
        ("{{ namespace(__class__=1) }}", "the private name '__class__'"),
        ("{% include 'x' %}", "no loader"),
        ("{{ unknown.name }}", "unknown"),
        ("{% for x in y %}", "end"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% endgeneration %}", "endgeneration"),
    ],
)
def test_refused_templates(template, message):
    with pytest.raises(ValueError, match=f"expected a chat template that renders these messages, got: .*{message}"):
        render(template)


FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BRANCHES = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for x in range(10 ** 9) %}{% endfor %}", "Range too big"),
        (FOREVER, "more than 500000 loop rounds and calls"),
        (BRANCHES, "more than 500000 loop rounds and calls"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 10 ** 10 }}", "a result of '[*]' that is too large"),
        ("{{ 10 ** 10 * [1] }}", "a result of '[*]' that is too large"),
        ("{{ 10 ** (10 ** 9) }}", "a result of '[*][*]' that is too large"),
        ("{% for x in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "output of more than 16777216 characters"),
    ],
)
def test_endless_templates_end(template, message):
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        render(template)
    assert time.monotonic() - start < 30


def test_arithmetic_still_works():
    template = (
        "{{ 30000 * 40000 }} {{ 2000 ** 2 }} {{ '-' * 3 }} {{ 3 * [1] }} {{ -2 * 3 }} {{ 0.5 * 4 }} {{ 2 ** -1 }}"
    )
    assert render(template) == "1200000000 4000000 --- [1, 1, 1] -6 2.0 0.5"


def test_one_rendering_does_not_count_for_the_next():
    template = "{% for x in range(99999) %}{% for y in 'abc' %}{% endfor %}{% endfor %}done"
    assert [render(template) for _ in range(3)] == ["done"] * 3


def test_source_of_any_length_is_not_read():
    with pytest.raises(ValueError, match="at most 1048576 characters, got 1048577"):
        render("a" * ((1 << 20) + 1))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "a list of at least one message"),
        ("text", "a list of at least one message"),
        ({"role": "user", "content": "x"}, "a list of at least one message"),
        (None, "a list of at least one message"),
        (["text"], "message 0 to have a string 'role', got 'text'"),
        ([*USER, {"content": "x"}], "message 1 to have a string 'role'"),
        ([{"role": "user"}], "message 0 to have a string 'content'"),
        ([{"role": "user", "content": None}], "message 0 to have a string 'content'"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "message 0 to have a string 'content'"),
        ([{"role": 3, "content": "x"}], "message 0 to have a string 'role'"),
    ],
)
def test_messages_of_another_form(messages, message):
    with pytest.raises(ValueError, match=message):
        render(CHATML, messages)
